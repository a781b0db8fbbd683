"""A small convolutional network learns digits: augmentation, validation, the best weights."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import lockstep

world = lockstep.init()
torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"


class Digits(torch.utils.data.Dataset):
    def __init__(self, images, labels, augment):
        self.images, self.labels, self.augment = images, labels, augment

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = self.images[index]
        if self.augment:
            shift = tuple(torch.randint(-1, 2, (2,)).tolist())
            image = image.roll(shift, (1, 2)) + 0.05 * torch.randn_like(image)
        return image, self.labels[index]


digits = load_digits()
images = torch.Tensor(digits.images).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
train_set = Digits(images[:1500], labels[:1500], augment=True)
valid_set = Digits(images[1500:], labels[1500:], augment=False)
train_loader = lockstep.DataLoader(train_set, batch_size=64, shuffle=True)
valid_loader = lockstep.DataLoader(valid_set, batch_size=128)

model = nn.Sequential(
    *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten()),
    nn.Linear(32 * 16, 10),
).to(device)
model = lockstep.parallelize(lockstep.SyncBatchNorm.convert_sync_batchnorm(model))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)

best = 0.0
for epoch in range(3):
    model.train()
    for x, y in train_loader:
        logits = model(x.to(device))
        loss = lockstep.mean(F.cross_entropy(logits, y.to(device), reduction="none"))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    model.eval()
    right = 0
    with torch.no_grad():
        for x, y in valid_loader:
            right += (model(x.to(device)).argmax(1).cpu() == y).sum().item()
    accuracy = lockstep.reduce(right, "sum") / len(valid_set)
    best = max(best, accuracy)
    world.print(f"epoch {epoch}: loss {loss.item():.6f} accuracy {accuracy:.6f} best {best:.6f}")
