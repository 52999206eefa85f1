"""SASRec in PyTorch, as a careful user would write it; `bench_training.py` runs against it.

The model, its start, its loss and its updates are those of `recmodels`, so that both learn the same
from the same batches: a pre-norm transformer with GPT-2's MLP, dropout on the input and on what
each half of a block adds, a tied table with an output bias, binary cross-entropy over the whole
catalog on dense labels, a clipped AdamW with warm-up and cosine decay.
"""

import math
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

_NORM_EPSILON = 1e-6
_BETAS = (0.9, 0.98)


class Block(nn.Module):
    """Attention, then a wider MLP, each added to the residual stream."""

    def __init__(self, dim: int, num_heads: int, mlp_ratio: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = nn.Dropout(dropout)
        self.attention_norm = nn.LayerNorm(dim, eps=_NORM_EPSILON)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.attention_out = nn.Linear(dim, dim)
        self.mlp_norm = nn.LayerNorm(dim, eps=_NORM_EPSILON)
        self.mlp_in = nn.Linear(dim, mlp_ratio * dim)
        self.mlp_out = nn.Linear(mlp_ratio * dim, dim)

    def forward(self, stream: Tensor, visible: Tensor) -> Tensor:
        """`[B, S, D]` from `[B, S, D]`; visible is `[B, 1, S, S]` bool."""
        batch, length, dim = stream.shape
        heads = (batch, length, 3, self.num_heads, dim // self.num_heads)
        qkv = self.qkv(self.attention_norm(stream)).view(heads).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(*qkv.unbind(0), attn_mask=visible)
        attended = attended.transpose(1, 2).reshape(batch, length, dim)
        stream = stream + self.dropout(self.attention_out(attended))
        widened = functional.gelu(self.mlp_in(self.mlp_norm(stream)), approximate="tanh")
        return stream + self.dropout(self.mlp_out(widened))


class SASRec(nn.Module):
    """Loss of a batch of histories.

    Args:
        recipe: the fields of a recipe by name.
        vocab_size: V, rows of the table; row 0 is padding.
    """

    def __init__(self, recipe: Mapping[str, Any], vocab_size: int) -> None:
        super().__init__()
        dim, length = recipe["hidden_dim"], recipe["max_length"]
        self.item_embeddings = nn.Parameter(torch.empty(vocab_size, dim))
        self.output_bias = nn.Parameter(torch.empty(vocab_size))
        self.positions = nn.Parameter(torch.empty(length, dim))
        self.dropout = nn.Dropout(recipe["dropout"])
        sizes = (dim, recipe["num_heads"], recipe["mlp_ratio"], recipe["dropout"])
        self.blocks = nn.ModuleList(Block(*sizes) for _ in range(recipe["num_layers"]))
        self.final_norm = nn.LayerNorm(dim, eps=_NORM_EPSILON)
        self.register_buffer("causal", torch.ones(length, length).tril().bool())
        self.register_buffer("itself", torch.eye(length).bool())

    def forward(self, history: Tensor, targets: Tensor) -> Tensor:
        """Sum over the catalog, mean over the positions with a target, of the cross-entropy.

        Args:
            history: `[B, S]` int64 rows, right-aligned, 0 on padding.
            targets: `[B, S, L]` int64 rows, 0 on padding.
        """
        mask = history > 0
        # Padding sees itself, or the softmax of its row would be 0/0; nobody else sees it.
        visible = (self.causal & mask[:, None, :]) | self.itself
        vectors = functional.embedding(history, self.item_embeddings)
        stream = self.dropout(vectors * mask[..., None] + self.positions)
        for block in self.blocks:
            stream = block(stream, visible[:, None])
        has_target = (targets > 0).any(-1)
        # Only these reach the loss: the rest of the last norm and of the logits is not computed.
        return self._loss(self.final_norm(stream[has_target]), targets[has_target])

    def _loss(self, activations: Tensor, targets: Tensor) -> Tensor:
        logits = functional.linear(activations, self.item_embeddings, self.output_bias).float()
        labels = torch.zeros_like(logits).scatter_(1, targets, 1.0)
        labels[:, 0] = 0
        total = functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
        return total / len(logits)


class Trainer:
    """A model with its optimizer.

    Args:
        recipe: the fields of a recipe by name.
        arrays: initial parameters of `recmodels` by path, such as "encoder/blocks/0/qkv/kernel".
        is_compiled: whether to run the model through `torch.compile`, which needs a C++ compiler.
    """

    def __init__(
        self, recipe: Mapping[str, Any], arrays: Mapping[str, np.ndarray], *, is_compiled: bool
    ) -> None:
        torch.set_num_threads(os.cpu_count() or 1)
        torch.manual_seed(recipe["seed"])
        self.recipe = recipe
        self.model = SASRec(recipe, len(arrays["item_embeddings"]))
        self.model.load_state_dict(_converted(arrays), strict=False)
        # The number of positions with a target differs from batch to batch.
        self.loss = torch.compile(self.model, dynamic=True) if is_compiled else self.model
        self.optimizer = torch.optim.AdamW(self._groups(), betas=_BETAS, fused=True)
        self.num_steps = 0

    def step(self, history: Tensor, targets: Tensor) -> float:
        """One update; returns the loss before it, a mean over the catalog too."""
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate()
        self.optimizer.zero_grad()
        is_bfloat16 = self.recipe["precision"] == "bfloat16"
        with torch.autocast("cpu", torch.bfloat16, enabled=is_bfloat16):
            loss = self.loss(history, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe["gradient_clip_norm"])
        self.optimizer.step()
        self.num_steps += 1
        return loss.item() / len(self.model.item_embeddings)

    def _groups(self) -> list[dict[str, Any]]:
        # Decay acts on matrices and the table, not on offsets, scales and positions.
        named = list(self.model.named_parameters())
        decayed = [p for name, p in named if p.dim() == 2 and name != "positions"]
        others = [p for name, p in named if p.dim() != 2 or name == "positions"]
        return [
            {"params": decayed, "weight_decay": self.recipe["weight_decay"]},
            {"params": others, "weight_decay": 0.0},
        ]

    def _learning_rate(self) -> float:
        recipe, step = self.recipe, self.num_steps
        warmup = min(1.0, (step + 1) / max(recipe["warmup_steps"], 1))
        decay_steps = max(recipe["num_steps"] - recipe["warmup_steps"], 1)
        progress = min(max((step - recipe["warmup_steps"]) / decay_steps, 0.0), 1.0)
        final = recipe["final_learning_rate_ratio"]
        decay = final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))
        return recipe["learning_rate"] * warmup * decay


def as_tensors(history: np.ndarray, targets: np.ndarray) -> tuple[Tensor, Tensor]:
    """A batch of `recmodels` as the model above takes it: int64, and 0 on padding everywhere."""
    return (
        torch.from_numpy(history.astype(np.int64)),
        torch.from_numpy(np.maximum(targets, 0).astype(np.int64)),
    )


def _converted(arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """Parameters by PyTorch's names: no "encoder", "weight" for kernels (transposed) and scales."""
    converted = {}
    for path, array in arrays.items():
        name = path.removeprefix("encoder/").replace("/", ".")
        array = array.T if name.endswith(".kernel") else array
        name = name.replace(".kernel", ".weight").replace(".scale", ".weight")
        converted[name] = torch.from_numpy(np.array(array, order="C"))  # a copy to write to
    return converted
