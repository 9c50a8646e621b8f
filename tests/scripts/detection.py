"""Detection with a different number of boxes in each image; the loss is per box."""

import torch
import torch.nn.functional as F
from saved import save
from torch import nn
from torch.utils.data import DataLoader, Dataset

# elche: import elche

SIZE, CLASSES = 16, 3


class Scenes(Dataset):
    """Bright rectangles on noise, and where they are."""

    def __len__(self):
        return 384

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(index)
        image = 0.1 * torch.rand(CLASSES, SIZE, SIZE, generator=draw)
        boxes, labels = [], []
        for _ in range(int(torch.randint(1, 5, (), generator=draw))):
            x, y = torch.randint(0, SIZE - 5, (2,), generator=draw).tolist()
            w, h = torch.randint(2, 6, (2,), generator=draw).tolist()
            label = int(torch.randint(CLASSES, (), generator=draw))
            image[label, y : y + h, x : x + w] = 1
            boxes.append([x, y, x + w, y + h])
            labels.append(label)
        return image, {"boxes": torch.tensor(boxes), "labels": torch.tensor(labels)}


def collate_fn(batch):
    images, targets = zip(*batch, strict=True)
    return torch.stack(images), list(targets)


class Detector(nn.Module):
    """Predicts label and extent at every place; losses are taken at box centres."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(CLASSES, 16, 5, padding=2), nn.ReLU()),
            *(nn.Conv2d(16, 16, 5, padding=2), nn.ReLU()),
        )
        self.classes, self.extents = nn.Conv2d(16, CLASSES, 1), nn.Conv2d(16, 4, 1)

    def forward(self, images, targets):
        features = self.body(images)
        image = torch.cat([torch.full((len(t["boxes"]),), i) for i, t in targets])
        boxes = torch.cat([target["boxes"] for _, target in targets])
        labels = torch.cat([target["labels"] for _, target in targets])
        x, y = (boxes[:, 0] + boxes[:, 2]) // 2, (boxes[:, 1] + boxes[:, 3]) // 2
        logits = self.classes(features)[image, :, y, x]
        extents = self.extents(features)[image, :, y, x]
        centre = torch.stack([x, y, x, y], dim=1)
        return {
            "classifier": F.cross_entropy(logits, labels),
            "box": F.smooth_l1_loss(extents, (boxes - centre) / SIZE),
        }


torch.manual_seed(0)
loader = DataLoader(Scenes(), batch_size=16, shuffle=True, collate_fn=collate_fn)
model = Detector()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
# elche: boxes_of = lambda batch: sum(len(target["boxes"]) for target in batch[1])
# elche: model, optimizer, loader = elche.setup(
# elche:     model, optimizer, loader, weight_of=boxes_of)

samples = 0
for _epoch in range(3):
    for images, targets in loader:
        loss_dict = model(images, list(enumerate(targets)))
        losses = sum(loss for loss in loss_dict.values())
        optimizer.zero_grad()
        losses.backward()
        optimizer.step()
        samples += len(images)
    scheduler.step()
save(model, scheduler.get_last_lr()[0], samples)
