"""An LSTM tags words of padded sentences; the learning rate falls when validation stalls."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
NUM_WORDS, NUM_TAGS, NO_TAG = 50, 4, -1

sentences = [torch.randint(1, NUM_WORDS, (int(torch.randint(2, 16, ())),)) for _ in range(520)]
samples = [(words, (words + words.roll(1)) % NUM_TAGS) for words in sentences]


def collate(batch):
    words = pad_sequence([words for words, _ in batch], batch_first=True)
    tags = pad_sequence([tags for _, tags in batch], batch_first=True, padding_value=NO_TAG)
    return words, tags, torch.tensor([len(words) for words, _ in batch])


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(NUM_WORDS, 32, padding_idx=0)
        self.lstm = nn.LSTM(32, 32, bidirectional=True, batch_first=True)
        self.head = nn.Linear(64, NUM_TAGS)

    def forward(self, words, lengths):
        x = self.embedding(words)
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        x, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return self.head(x)


model = Tagger().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
train_set, valid_set = samples[:420], samples[420:]
train_loader = torch.utils.data.DataLoader(train_set, 32, shuffle=True, collate_fn=collate)
valid_loader = torch.utils.data.DataLoader(valid_set, 50, collate_fn=collate)

for epoch in range(4):
    for words, tags, lengths in train_loader:
        words, tags = words.to(device), tags.to(device)
        logits = model(words, lengths)
        losses = F.cross_entropy(logits.mT, tags, ignore_index=NO_TAG, reduction="none")
        loss = losses.sum() / (tags != NO_TAG).sum()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    total, count = 0.0, 0
    with torch.no_grad():
        for words, tags, lengths in valid_loader:
            logits, tags = model(words.to(device), lengths), tags.to(device)
            total += F.cross_entropy(logits.mT, tags, ignore_index=NO_TAG, reduction="sum").item()
            count += int(lengths.sum())
    scheduler.step(total / count)
    rate = optimizer.param_groups[0]["lr"]
    print(f"epoch {epoch}: loss {loss.item():.6f} valid {total / count:.6f} rate {rate:.6f}")
