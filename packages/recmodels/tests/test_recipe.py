import json

import pytest

from recmodels import RECIPES, Recipe, UserError, get_recipe


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dropout": 1.0}, "`dropout` must be at least 0 and below 1; got 1.0"),
        ({"num_heads": 3}, r"`num_heads` must be a divisor of `hidden_dim` \(64\); got 3"),
        ({"protocol": "next"}, "`protocol` must be one of next-8, leave-one-out; got 'next'"),
        ({"num_steps": 0}, "`num_steps` must be at least 1; got 0"),
        ({"num_steps": 1.5}, "`num_steps` must be of type int; got 1.5"),
        ({"hide_seen": 1}, "`hide_seen` must be of type bool; got 1"),
        ({"learning_rate": float("nan")}, "`learning_rate` must be a finite float; got nan"),
        ({"ema_decay": 1.0}, "`ema_decay` must be at least 0 and below 1; got 1.0"),
        ({"patience": 2}, '`patience` must be used with a `selection` other than "last"; got 2'),
        ({"accumulate_steps": 3}, r"`accumulate_steps` must be a divisor of `batch_size` \(32\)"),
        (
            {"loss": "cut-softmax"},
            "`loss` must be another one for `num_targets` 8; cut-softmax takes",
        ),
        ({"num_negatives": 2**20}, r"`num_negatives` must be below 2\*\*20; got 1048576"),
        ({"batch_size": 10**11}, "`batch_size` must be such that its positions, times .* 64, stay"),
        ({"loss": "gbce", "label_smoothing": 0.1}, "`label_smoothing` must be 0 with `loss` gbce"),
        ({"seed": -1}, r"`seed` must be between 0 and 2\*\*32 - 1; got -1"),
        ({"seed": 2**32}, r"`seed` must be between 0 and 2\*\*32 - 1; got 4294967296"),
        (
            {"mask_share": 0.3},
            "`mask_share` is read with `model` bert4rec only; with sasrec",
        ),
        ({"mask_end_share": 0.3}, "`mask_end_share` is read with `model` bert4rec only"),
        (
            {"num_negatives": 8},
            "`num_negatives` is read with `loss` sampled-bce or gbce only",
        ),
        (
            {"loss": "sampled-bce", "gbce_calibration": 0.5},
            "is read with `loss` gbce only; with",
        ),
        (
            {"loss": "dense-bce", "gradient_mode": "fused"},
            "it must be 'auto'; got 'fused'",
        ),
        (
            {"loss": "gbce", "precision": "highest"},
            "`precision` is read with `loss` cut-bce or",
        ),
        ({"bogus": 1}, "a recipe has no field `bogus`"),
    ],
)
def test_bad_values_name_the_field(values, message):
    with pytest.raises(UserError, match=message):
        get_recipe("sasrec-demo").override(**values)


def test_unknown_name_lists_the_names():
    with pytest.raises(UserError, match="no recipe 'sasrec'; choose one of sasrec-demo, sasrec-b"):
        get_recipe("sasrec")


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_survive_json(name):
    recipe = RECIPES[name]
    assert recipe.name == name
    assert Recipe(**json.loads(json.dumps(recipe.to_dict()))) == recipe


def test_yambda_recipe_is_the_published_one():
    recipe = RECIPES["sasrec-yambda-50m"]
    sizes = (recipe.num_layers, recipe.num_heads, recipe.hidden_dim, recipe.max_length)
    assert sizes == (3, 4, 256, 256)
    schedule = (recipe.batch_size, recipe.learning_rate, recipe.warmup_steps, recipe.num_steps)
    assert schedule == (64, 5e-4, 5_000, 300_000)
    assert (recipe.protocol, recipe.num_targets, recipe.hide_seen) == ("next-8", 8, False)
