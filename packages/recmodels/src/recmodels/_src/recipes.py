"""The built-in recipes. What they are for and how they compare stands in `recipe_facts.py`."""

from recmodels._src.errors import UserError
from recmodels._src.recipe import Recipe

# The published setting: paper's sizes, schedule length and unhidden seen items.
_YAMBDA_50M = Recipe(
    name="sasrec-yambda-50m",
    protocol="next-8",
    max_length=256,
    hidden_dim=256,
    num_layers=3,
    num_heads=4,
    dropout=0.1,
    batch_size=64,
    num_steps=300_000,
    learning_rate=5e-4,
    warmup_steps=5_000,
    hide_seen=False,
    log_every=100,
    evaluate_every=20_000,
    checkpoint_every=5_000,
)

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            name="sasrec-demo",
            protocol="next-8",
            max_length=64,
            dropout=0.1,
            batch_size=32,
            num_steps=500,
            learning_rate=5e-3,
            warmup_steps=40,
            final_learning_rate_ratio=0.05,
            log_every=10,
            evaluate_every=250,
            checkpoint_every=100,
        ),
        Recipe(
            name="sasrec-beauty",
            protocol="leave-one-out",
            num_targets=1,
            max_length=20,  # nine users in ten have at most 14 interactions
            dropout=0.5,
            precision="bfloat16",
            batch_size=256,
            num_steps=3000,
            learning_rate=2e-3,
            selection="ndcg@10",
            log_every=100,
            evaluate_every=500,
            checkpoint_every=500,
        ),
        Recipe(
            name="sasrec-ml-1m",
            protocol="next-8",
            max_length=100,
            batch_size=64,
            num_steps=2000,
            learning_rate=3e-3,
            log_every=50,
            evaluate_every=500,
            checkpoint_every=250,
        ),
        Recipe(
            name="sasrec-ml-1m-leave-one-out",
            protocol="leave-one-out",
            num_targets=1,
            max_length=200,
            num_layers=3,
            num_heads=2,
            mlp_ratio=1,
            activation="relu",
            loss="cut-softmax",
            precision="bfloat16",
            dropout=0.25,
            batch_size=64,
            num_steps=5000,
            learning_rate=3e-3,
            warmup_steps=200,
            ema_decay=0.995,
            selection="ndcg@10",
            log_every=100,
            evaluate_every=500,
            checkpoint_every=500,
        ),
        Recipe(
            name="sasrec-ml-100k",
            protocol="next-8",
            max_length=100,
            batch_size=32,
            num_steps=1000,
            learning_rate=3e-3,
            warmup_steps=50,
            log_every=50,
            evaluate_every=250,
            checkpoint_every=250,
        ),
        # The sizes and shares of masks published for BERT4Rec; norms come first, as in SASRec.
        Recipe(
            name="bert4rec-beauty",
            protocol="leave-one-out",
            model="bert4rec",
            loss="cut-softmax",
            num_targets=1,
            mask_share=0.6,
            max_length=20,
            dropout=0.5,
            batch_size=256,
            num_steps=4000,
            learning_rate=2e-3,
            log_every=100,
            evaluate_every=500,
            checkpoint_every=500,
        ),
        Recipe(
            name="bert4rec-ml-1m",
            protocol="leave-one-out",
            model="bert4rec",
            loss="cut-softmax",
            num_targets=1,
            max_length=200,
            batch_size=64,
            num_steps=6000,
            learning_rate=1e-3,
            log_every=100,
            evaluate_every=500,
            checkpoint_every=500,
        ),
        _YAMBDA_50M,
        # The same model for the larger sets, on 16 chips and more.
        _YAMBDA_50M.override(name="sasrec-yambda-500m", batch_size=256, num_steps=150_000),
        _YAMBDA_50M.override(name="sasrec-yambda-5b", batch_size=512),
    )
}
"""The built-in recipes by name."""


def get_recipe(name: str) -> Recipe:
    """Looks up a built-in recipe.

    Args:
        name: one of the keys of `RECIPES`.

    Returns:
        The recipe.

    Raises:
        UserError: there is no such recipe; the message lists the names.
    """
    if name not in RECIPES:
        raise UserError(f"no recipe {name!r}; choose one of {', '.join(RECIPES)}.")
    return RECIPES[name]
