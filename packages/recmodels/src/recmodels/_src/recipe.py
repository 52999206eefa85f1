"""Recipes: every choice that decides how a model is trained and measured, in one frozen object."""

import dataclasses
import math
from dataclasses import field
from typing import Any, Literal, get_args, get_origin

from recmodels._src.data.splits import Protocol
from recmodels._src.errors import UserError

GradientMode = Literal["auto", "fused", "recompute"]
ComputeDtype = Literal["float32", "bfloat16"]
Precision = Literal["default", "bfloat16", "highest"]
TableLayout = Literal["auto", "replicated", "sharded"]
LossName = Literal["cut-bce", "cut-softmax", "dense-bce", "sampled-bce", "gbce"]
TableOptimizer = Literal["adamw", "adafactor", "rowwise-adagrad"]
ModelName = Literal["sasrec", "bert4rec"]
NormPlace = Literal["pre", "post"]
Positions = Literal["learned", "rotary"]
Activation = Literal["gelu", "relu"]
Selection = Literal["last", "ndcg@8", "ndcg@10", "hit@8", "hit@10"]

DATA_AXIS, MODEL_AXIS = "data", "model"
_ALL_DEVICES = "auto"
_MODEL_FIELDS = (
    "model", "max_length", "hidden_dim", "num_layers", "num_heads", "mlp_ratio", "activation",
    "norm", "positions", "tie_embeddings", "output_bias", "item_categories", "time_gaps",
)  # fmt: skip


def _help(text: str) -> dict[str, str]:
    return {"help": text}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is trained, how, and how it is measured.

    Every field carries its meaning in `metadata["help"]`, which is also the help text of the
    command-line option of the same name.

    Raises:
        UserError: a value is outside its range; the message names field, value and rule.
    """

    name: str = field(metadata=_help("name of the recipe, written into the run and the bundle"))
    protocol: Protocol = field(
        metadata=_help("split: next-8 (many targets) or leave-one-out (one target)")
    )
    model: ModelName = field(
        default="sasrec",
        metadata=_help(
            "sasrec reads forwards and predicts after every position; bert4rec reads both ways and "
            "predicts masked spans of num_targets positions"
        ),
    )
    num_targets: int = field(
        default=8, metadata=_help("items that each training position predicts")
    )
    max_length: int = field(default=50, metadata=_help("most recent items that the model reads"))
    hidden_dim: int = field(default=64, metadata=_help("width of item vectors and blocks"))
    num_layers: int = field(default=2, metadata=_help("transformer blocks"))
    num_heads: int = field(default=2, metadata=_help("attention heads; divides hidden_dim"))
    mlp_ratio: int = field(
        default=4, metadata=_help("width of the inside of a block's MLP, in hidden_dim")
    )
    activation: Activation = field(
        default="gelu", metadata=_help("activation inside a block's MLP")
    )
    norm: NormPlace = field(
        default="pre",
        metadata=_help(
            "layer norm before each half of a block and after the last one, or after each half and "
            "on the input, as published for BERT4Rec"
        ),
    )
    positions: Positions = field(
        default="learned",
        metadata=_help("one learned vector per place, or rotations of queries and keys"),
    )
    tie_embeddings: bool = field(
        default=True,
        metadata=_help("score items with the vectors that histories are read with"),
    )
    item_categories: bool = field(
        default=False,
        metadata=_help(
            "add the mean vector of an item's categories to its vector in the history; the store "
            "must have categories"
        ),
    )
    time_gaps: bool = field(
        default=False,
        metadata=_help(
            "add a vector for the time since the event before to each vector of the history, by "
            "powers of two in seconds; the store must have times"
        ),
    )
    mask_share: float = field(
        default=0.2, metadata=_help("share of a window that bert4rec masks, in whole spans")
    )
    mask_end_share: float = field(
        default=0.2,
        metadata=_help(
            "share of windows in which bert4rec masks the last span and nothing else, as in "
            "evaluation"
        ),
    )
    dropout: float = field(
        default=0.2, metadata=_help("share of inputs and block outputs dropped in training")
    )
    output_bias: bool = field(
        default=True,
        metadata=_help("learn one bias per item, started at the log-odds of its popularity"),
    )
    batch_size: int = field(default=64, metadata=_help("training windows per step"))
    num_steps: int = field(default=1000, metadata=_help("optimizer steps in all"))
    learning_rate: float = field(default=1e-3, metadata=_help("peak learning rate of AdamW"))
    warmup_steps: int = field(default=100, metadata=_help("steps of linear warm-up to the peak"))
    final_learning_rate_ratio: float = field(
        default=0.1, metadata=_help("share of the peak at which the cosine decay ends")
    )
    weight_decay: float = field(
        default=0.01, metadata=_help("AdamW weight decay (not on biases, norms, positions)")
    )
    gradient_clip_norm: float = field(default=1.0, metadata=_help("largest global gradient norm"))
    accumulate_steps: int = field(
        default=1,
        metadata=_help("parts of a batch computed one after another, for less memory"),
    )
    table_optimizer: TableOptimizer = field(
        default="adamw",
        metadata=_help("optimizer of the item table; the others keep far less than AdamW's state"),
    )
    ema_decay: float = field(
        default=0.0,
        metadata=_help(
            "share of a running average of the weights kept at each step; that average is "
            "evaluated and exported. 0 takes the weights themselves"
        ),
    )
    selection: Selection = field(
        default="last",
        metadata=_help(
            "evaluated step that is tested and exported: the last one, or the best on the dev part "
            "by this metric"
        ),
    )
    patience: int = field(
        default=0,
        metadata=_help("dev evaluations without a better one after which to stop; 0 never stops"),
    )
    seed: int = field(default=0, metadata=_help("seed of initial weights, dropout and data order"))
    hide_seen: bool = field(
        default=True,
        metadata=_help(
            "never recommend items of the history: same meaning in evaluation and serving"
        ),
    )
    loss: LossName = field(
        default="cut-bce",
        metadata=_help(
            "exact over the catalog: cut-bce (any number of targets), cut-softmax (one target), "
            "dense-bce (cut-bce with all logits in memory); with sampled negatives: sampled-bce, "
            "gbce"
        ),
    )
    num_negatives: int = field(
        default=256, metadata=_help("negatives drawn for each position by a sampled loss")
    )
    gbce_calibration: float = field(
        default=0.75, metadata=_help("t of gbce: 0 is sampled-bce, 1 undoes the sampling")
    )
    label_smoothing: float = field(
        default=0.0, metadata=_help("share by which targets move towards 0.5")
    )
    gradient_mode: GradientMode = field(
        default="auto", metadata=_help("how the loss makes its gradients")
    )
    compute_dtype: ComputeDtype = field(
        default="float32",
        metadata=_help("type of matrix products; weights, softmax and loss stay float32"),
    )
    precision: Precision = field(default="default", metadata=_help("matrix precision of the loss"))
    mesh: str = field(
        default=_ALL_DEVICES,
        metadata=_help(
            "devices to train on, such as data=8 or data=4,model=2: data splits the batch, both "
            "together a sharded table; auto is all of them along data"
        ),
    )
    table: TableLayout = field(
        default="auto",
        metadata=_help(
            "item table with its optimizer state: whole on every device, or sharded by rows over "
            "all of them; auto shards from 100,000 items up"
        ),
    )
    log_every: int = field(default=50, metadata=_help("steps between loss records"))
    evaluate_every: int = field(
        default=500, metadata=_help("steps between evaluations on the dev part")
    )
    checkpoint_every: int = field(default=500, metadata=_help("steps between checkpoints"))
    keep_checkpoints: int = field(default=2, metadata=_help("checkpoints kept, the newest ones"))

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            object.__setattr__(self, each.name, _checked(each, getattr(self, each.name)))
        for name, rule, holds in _RULES:
            value = getattr(self, name)
            if not holds(self, value):
                raise UserError(f"`{name}` must be {rule.format(self)}; got {value!r}.")
        for name, chooser, readers in _READ_BY:
            value, default = getattr(self, name), self.__dataclass_fields__[name].default
            if value != default and getattr(self, chooser) not in readers:
                raise UserError(
                    f"`{name}` is read with `{chooser}` {' or '.join(readers)} only; with "
                    f"{getattr(self, chooser)} it must be {default!r}; got {value!r}."
                )
        parse_mesh(self.mesh)

    def override(self, **values: Any) -> "Recipe":
        """The same recipe with some fields changed; unknown names raise `UserError`."""
        unknown = sorted(set(values) - {each.name for each in dataclasses.fields(self)})
        if unknown:
            raise UserError(f"a recipe has no field `{unknown[0]}`; see `recmodels recipes`.")
        return dataclasses.replace(self, **values)

    def to_dict(self) -> dict[str, Any]:
        """All fields by name, ready for JSON."""
        return dataclasses.asdict(self)

    def model_settings(self) -> dict[str, Any]:
        """The fields that decide the shapes of the parameters and what they mean, by name."""
        # A masked span takes as many positions as there are targets.
        spans = ("num_targets",) if self.model == "bert4rec" else ()
        return {name: getattr(self, name) for name in (*_MODEL_FIELDS, *spans)}


def parse_mesh(mesh: str) -> dict[str, int]:
    """Devices along each axis of the mesh that a recipe's `mesh` describes; empty for "auto".

    Raises:
        UserError: it is not of the form "data=8" or "data=4,model=2".
    """
    if mesh == _ALL_DEVICES:
        return {}
    sizes = {}
    for part in mesh.split(","):
        axis, _, size = part.partition("=")
        if axis not in (DATA_AXIS, MODEL_AXIS) or axis in sizes or not _is_count(size):
            sizes = {}
            break
        sizes[axis] = int(size)
    if DATA_AXIS not in sizes:
        raise UserError(
            f'`mesh` must be "{_ALL_DEVICES}" or device counts such as "{DATA_AXIS}=8" or '
            f'"{DATA_AXIS}=4,{MODEL_AXIS}=2"; got {mesh!r}.'
        )
    return sizes


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and int(text) > 0


def _checked(declared: "dataclasses.Field[Any]", value: Any) -> Any:
    """`value` in the declared type of its field; an int is accepted where a float is declared."""
    name, kind = declared.name, declared.type
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            allowed = ", ".join(get_args(kind))
            raise UserError(f"`{name}` must be one of {allowed}; got {value!r}.")
        return value
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind or (kind is float and not math.isfinite(value)):
        wanted = "a finite float" if kind is float else f"of type {getattr(kind, '__name__', kind)}"
        raise UserError(f"`{name}` must be {wanted}; got {value!r}.")
    return value


def _positive(_: Recipe, value: float) -> bool:
    return value > 0


def _not_negative(_: Recipe, value: float) -> bool:
    return value >= 0


def _share(_: Recipe, value: float) -> bool:
    return 0 <= value < 1


# (field, field that decides whether it is read, values with which it is)
_READ_BY = (
    ("mask_share", "model", ("bert4rec",)),
    ("mask_end_share", "model", ("bert4rec",)),
    ("num_negatives", "loss", ("sampled-bce", "gbce")),
    ("gbce_calibration", "loss", ("gbce",)),
    ("gradient_mode", "loss", ("cut-bce",)),
    ("precision", "loss", ("cut-bce", "cut-softmax")),
)

# (field, rule in words with fields of the recipe filled in, test)
_RULES = (
    *((name, "at least 1", _positive) for name in ("num_targets", "max_length", "hidden_dim")),
    *((name, "at least 1", _positive) for name in ("num_layers", "num_heads", "batch_size")),
    *((name, "at least 1", _positive) for name in ("num_steps", "log_every", "evaluate_every")),
    *((name, "at least 1", _positive) for name in ("checkpoint_every", "keep_checkpoints")),
    *((name, "above 0", _positive) for name in ("learning_rate", "gradient_clip_norm")),
    *((name, "at least 1", _positive) for name in ("num_negatives", "accumulate_steps")),
    *((name, "at least 0", _not_negative) for name in ("warmup_steps", "weight_decay", "patience")),
    *((name, "at least 0 and below 1", _share) for name in ("dropout", "label_smoothing")),
    ("ema_decay", "at least 0 and below 1", _share),
    ("mlp_ratio", "at least 1", _positive),
    ("mask_share", "above 0 and below 1", lambda _, value: 0 < value < 1),
    ("mask_end_share", "between 0 and 1", lambda _, value: 0 <= value <= 1),
    ("gbce_calibration", "between 0 and 1", lambda _, value: 0 <= value <= 1),
    ("seed", "between 0 and 2**32 - 1", lambda _, value: 0 <= value < 2**32),
    ("final_learning_rate_ratio", "between 0 and 1", lambda _, value: 0 <= value <= 1),
    ("name", "a non-empty text", lambda _, value: bool(value)),
    (
        "num_heads",
        "a divisor of `hidden_dim` ({0.hidden_dim})",
        lambda recipe, value: recipe.hidden_dim % value == 0,
    ),
    (
        "positions",
        "learned for heads of odd width ({0.hidden_dim} / {0.num_heads})",
        lambda recipe, value: value == "learned" or recipe.hidden_dim // recipe.num_heads % 2 == 0,
    ),
    (
        "accumulate_steps",
        "a divisor of `batch_size` ({0.batch_size})",
        lambda recipe, value: recipe.batch_size % value == 0,
    ),
    (
        "batch_size",
        "such that its positions, times `max_length` {0.max_length}, stay below 2**31",
        lambda recipe, value: value * recipe.max_length < 2**31,
    ),
    ("num_negatives", "below 2**20", lambda _, value: value < 2**20),
    (
        "loss",
        "another one for `num_targets` {0.num_targets}; cut-softmax takes one target",
        lambda recipe, value: value != "cut-softmax" or recipe.num_targets == 1,
    ),
    (
        "label_smoothing",
        "0 with `loss` {0.loss}, which has none",
        lambda recipe, value: not value or recipe.loss in ("cut-bce", "dense-bce"),
    ),
    (
        "patience",
        'used with a `selection` other than "last"',
        lambda recipe, value: not value or recipe.selection != "last",
    ),
)
