"""Opacus: seconds a step of its three ways to clip, and of ordinary PyTorch.

Models are ordinary PyTorch; those whose layers Opacus cannot clip (LSTM, multi-head
attention) go through its own `ModuleValidator.fix`, and only in the private ways.
"""

import warnings

import torch
import turns
from opacus import PrivacyEngine
from opacus.validators import ModuleValidator
from torch import nn


class Last(nn.Module):
    """An LSTM that returns its last output."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(64, 64, batch_first=True)

    def forward(self, x):
        """Runs over all tokens."""
        return self.lstm(x)[0][:, -1]


class Block(nn.Module):
    """A block of BERT: attention and two dense layers, normalised after each sum."""

    def __init__(self, width=256, heads=4, inner=1024):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.dense = nn.Sequential(
            nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, x):
        """Runs the block."""
        x = self.norms[0](x + self.attention(x, x, x, need_weights=False)[0])
        return self.norms[1](x + self.dense(x))


class Embeddings(nn.Module):
    """Sum of the embeddings of token, position and segment, normalised."""

    def __init__(self, width=256):
        super().__init__()
        self.token = nn.Embedding(turns.VOCABULARY, width)
        self.position = nn.Embedding(turns.TOKENS, width)
        self.segment = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        """Embeds; all tokens are of the first segment."""
        # One row of positions a record: Opacus takes the first axis for the records.
        positions = torch.arange(x.shape[1], device=x.device).repeat(len(x), 1)
        segments = torch.zeros_like(x)
        return self.norm(
            self.token(x) + self.position(positions) + self.segment(segments)
        )


class First(nn.Module):
    """Takes the first token."""

    def forward(self, x):
        """Drops all other tokens."""
        return x[:, 0]


def cnn():
    """As in speed.py."""
    layers, before = [], 3
    for channels in (32, 64, 128):
        for _ in range(2):
            layers += [nn.Conv2d(before, channels, 3, padding="same"), nn.ReLU()]
            before = channels
        layers.append(nn.MaxPool2d(2))
    layers += [nn.Flatten(), nn.Linear(2048, 128), nn.ReLU(), nn.Linear(128, 10)]
    return nn.Sequential(*layers)


def mlp():
    """As in speed.py."""
    return nn.Sequential(
        nn.Linear(784, 256),
        nn.ReLU(),
        nn.Linear(256, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )


def lstm():
    """As in speed.py."""
    return nn.Sequential(nn.Embedding(turns.VOCABULARY, 64), Last(), nn.Linear(64, 2))


def bert():
    """As in speed.py: 4 layers, pooled first token, no dropout."""
    blocks = [Block() for _ in range(4)]
    pooler = [First(), nn.Linear(256, 256), nn.Tanh()]
    return nn.Sequential(Embeddings(), *blocks, *pooler, nn.Linear(256, 2))


MODELS = {"cnn": cnn, "mlp": mlp, "lstm": lstm, "bert": bert}


def tensors(x, y):
    """The batch in PyTorch's layout."""
    if x.ndim == 4:
        x = x.transpose(0, 3, 1, 2).copy()
    return torch.from_numpy(x), torch.from_numpy(y).long()


def ordinary(name: str):
    """Returns a maker of ordinary steps."""

    def make(x, y):
        x, y = tensors(x, y)
        torch.manual_seed(0)
        model = MODELS[name]().train()
        optimizer = torch.optim.Adam(model.parameters(), turns.RATE)
        criterion = nn.CrossEntropyLoss()

        def step():
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            return loss.item()

        return step

    return make


def private(name: str, mode: str, noise: float = turns.NOISE):
    """Returns a maker of private steps, in one of Opacus' grad_sample_modes."""

    def make(x, y):
        x, y = tensors(x, y)
        torch.manual_seed(0)
        model = ModuleValidator.fix(MODELS[name]()).train()
        optimizer = torch.optim.Adam(model.parameters(), turns.RATE)
        # One batch a pass: its length is what Opacus divides the sum by.
        loader = torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(x, y), batch_size=len(x)
        )
        made = PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            criterion=nn.CrossEntropyLoss(),
            data_loader=loader,
            noise_multiplier=noise,
            max_grad_norm=turns.CLIP,
            poisson_sampling=False,
            grad_sample_mode=mode,
        )
        model, optimizer = made[:2]
        criterion = made[2] if mode == "ghost" else nn.CrossEntropyLoss()

        def step():
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            return loss.item()

        step.optimizer = optimizer
        return step

    return make


def ways(name: str) -> dict:
    """Makers for a model, ordinary training first."""
    if name not in MODELS:
        return {}
    modes = {mode: private(name, mode) for mode in ("hooks", "ghost", "functorch")}
    return {"PyTorch": ordinary(name), **modes}


if __name__ == "__main__":
    # Of hooks on inputs that need no gradient and of the generator: the same each step.
    warnings.simplefilter("ignore")
    turns.run(["opacus", "torch"], ways)
