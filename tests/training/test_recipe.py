"""Recipes: overrides from text and TOML, and what is said about unknown fields and wrong types."""

import dataclasses

import pytest

from semel import recipes
from semel.training import Recipe, override, read_overrides


def test_overrides_reach_nested_fields_and_parse_text():
    recipe = override(recipes.get("ml1m_rank"), {
        "epochs": "3", "model.encoder.layers": "4", "model.hidden": "64,32", "optimizer": {"schedule": "linear"},
        "examples.max_candidates": "none", "model.encoder.time": "false",
    })
    assert recipe.epochs == 3 and recipe.model.encoder.layers == 4 and recipe.model.hidden == (64, 32)
    assert recipe.optimizer.schedule == "linear" and recipe.examples.max_candidates is None
    assert recipe.model.encoder.time is False
    for text in ('["user_id", "age"]', "['user_id','age']", "user_id, age"):  # as JSON, Python or a shell would have it
        assert override(recipe, {"sharding.tables": text}).sharding.tables == ("user_id", "age")
    assert recipes.get("ml1m_rank").epochs != 3 or recipe is not recipes.get("ml1m_rank")


@pytest.mark.parametrize(("name", "value", "message"), [
    ("epoch", 3, "nearest is 'epochs'"),
    ("model.encoder.layer", 3, "nearest is 'layers'"),
    ("epochs.x", 3, "has no fields"),
    ("epochs", "many", "epochs must be int"),
    ("epochs", 2.5, "epochs must be int"),
    ("epochs", True, "epochs must be int"),
    ("epochs", 0, "at least 1"),
    ("model.kind", "gpt", "must be one of"),
    ("optimizer.schedule", "stairs", "must be one of"),
    ("model.encoder.time", "perhaps", "must be bool"),
    ("features", "x", "must be a table"),
])
def test_a_wrong_field_or_value_is_one_clear_error(name, value, message):
    with pytest.raises(ValueError, match=message):
        override(recipes.get("ml1m_rank"), {name: value})


def test_toml(tmp_path):
    file = tmp_path / "r.toml"
    file.write_text("epochs = 2\n[model.encoder]\nlayers = 1\n[optimizer]\nlearning_rate = 1\n")
    recipe = override(recipes.get("ml1m_next"), read_overrides(file))
    assert (recipe.epochs, recipe.model.encoder.layers, recipe.optimizer.learning_rate) == (2, 1, 1.0)
    file.write_text("epochs = ")
    with pytest.raises(ValueError, match="is not TOML"):
        read_overrides(file)
    with pytest.raises(FileNotFoundError, match="no such file"):
        read_overrides(tmp_path / "none.toml")


@pytest.mark.parametrize("name", recipes.names())
def test_every_recipe_is_frozen_data_that_survives_json(name):
    import json

    recipe = recipes.get(name)
    assert recipe.name == name
    assert Recipe.from_json(json.loads(json.dumps(recipe.to_json()))) == recipe
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.epochs = 1


def test_an_unknown_recipe_names_the_nearest():
    with pytest.raises(ValueError, match="nearest is 'ml1m_rank'"):
        recipes.get("ml1m_rnk")


@pytest.mark.parametrize(("field", "value"), [
    ("examples.earlier_windows", -0.1), ("examples.earlier_windows", 2.0), ("examples.test_fraction", float("nan")),
    ("model.negatives", -5), ("model.popularity", float("nan")), ("model.temperature", 0.0), ("model.dim", 0),
    ("model.embedding_dropout", 1.5), ("model.encoder.heads", 0), ("model.encoder.dropout", -0.1),
    ("optimizer.learning_rate", float("nan")), ("optimizer.learning_rate", -1.0), ("optimizer.beta2", 1.0),
])
def test_a_number_out_of_range_is_refused_by_its_name(field, value):
    with pytest.raises(ValueError, match=r"\.".join(field.split(".")[-2:]) + " must be"):
        override(recipes.get("ml1m_next"), {field: value})
