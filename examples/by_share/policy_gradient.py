"""A policy gradient: each step's 64 episodes are divided by `elche.share`.

python examples/by_share/policy_gradient.py                     one device
elche run --speeds 1,0.25 examples/by_share/policy_gradient.py  one four times slower

An agent on a line of nine places starts at the middle. It sees its place, moves left or
right eight times, and is paid for its last place.
"""

import torch
from torch import nn

import elche

PLACES, MOVES, EPISODES = 9, 8, 64

group = elche.init_group()
device = elche.device()
torch.manual_seed(group.rank)  # every rank plays episodes of its own
policy = nn.Sequential(nn.Linear(PLACES, 32), nn.Tanh(), nn.Linear(32, 2)).to(device)
replica = elche.Replica.wrap(policy, group, name="policy")
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)


def play(episodes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of the moves of some episodes, and their returns."""
    place = torch.full((episodes,), PLACES // 2, device=device)
    log_probabilities = torch.zeros(episodes, device=device)
    for _ in range(MOVES):
        seen = nn.functional.one_hot(place, PLACES).float()
        choice = torch.distributions.Categorical(logits=policy(seen))
        move = choice.sample()
        log_probabilities = log_probabilities + choice.log_prob(move)
        place = (place + 2 * move - 1).clamp(0, PLACES - 1)
    return log_probabilities, place / (PLACES - 1)


for step in range(81):
    episodes = len(elche.share(EPISODES))
    log_probabilities, returns = play(episodes)
    baseline = elche.gather(returns).mean()  # of the episodes of all ranks
    loss = -(log_probabilities * (returns - baseline)).mean()
    optimizer.zero_grad()
    loss.backward()
    replica.weighted_all_reduce_gradients(episodes)
    optimizer.step()
    if step % 20 == 0:
        print(
            f"step {step} rank {group.rank}: {episodes} episodes, return {baseline:.2f}"
        )

replica.check_equal()
