"""REINFORCE on a small cart-pole, gradients summed over episodes by hand."""

import math

import torch
from saved import save
from torch import nn
from torch.distributions import Categorical

# elche: import elche

UPDATES, EPISODES, MAX_STEPS, GAMMA = 12, 8, 60, 0.98


class CartPole:
    """The classic equations of motion; ends when the pole falls."""

    def reset(self, seed):
        draw = torch.Generator().manual_seed(seed)
        self.state = (0.1 * torch.rand(4, generator=draw) - 0.05).tolist()
        return torch.tensor(self.state)

    def step(self, action):
        x, v, angle, rate = self.state
        force = 10.0 if action else -10.0
        push = (force + 0.05 * rate**2 * math.sin(angle)) / 1.1
        turn = (9.8 * math.sin(angle) - math.cos(angle) * push) / (
            0.5 * (4 / 3 - 0.1 * math.cos(angle) ** 2 / 1.1)
        )
        speed = push - 0.05 * turn * math.cos(angle) / 1.1
        self.state = [x + 0.02 * v, v + 0.02 * speed, angle + 0.02 * rate]
        self.state.append(rate + 0.02 * turn)
        return torch.tensor(self.state), abs(self.state[2]) > 0.21


def play(env, policy, seed):
    """One episode; its loss, by returns that count from each step on."""
    torch.manual_seed(seed)
    observation, log_probs = env.reset(seed), []
    for _ in range(MAX_STEPS):
        action = Categorical(logits=policy(observation))
        choice = action.sample()
        log_probs.append(action.log_prob(choice))
        observation, is_done = env.step(int(choice))
        if is_done:
            break
    left = torch.arange(len(log_probs), 0, -1)
    returns = (1 - GAMMA**left) / (1 - GAMMA)
    return -(torch.stack(log_probs) * (returns - returns.mean()) / 10).sum()


torch.manual_seed(0)
policy = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
# elche: replica = elche.Replica.wrap(policy, elche.init_group())
env, samples = CartPole(), 0
for update in range(UPDATES):
    episodes = range(EPISODES)
    # elche: episodes = range(elche.rank(), EPISODES, elche.world_size())
    losses = [play(env, policy, update * EPISODES + episode) for episode in episodes]
    optimizer.zero_grad()
    torch.stack(losses).mean().backward()
    # elche: replica.weighted_all_reduce_gradients(len(losses))
    optimizer.step()
    samples += len(losses)
save(policy, optimizer.param_groups[0]["lr"], samples)
