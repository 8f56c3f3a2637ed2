"""Every model: shapes, gradients, and the same outputs from disk."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from model_batches import FEATURES, config, encoders, make_batch

from semel.batch import JaggedTable, RequestBatch
from semel.models import (
    EncoderConfig,
    current_version,
    load_model,
    make_model,
    model_versions,
    ranking_loss,
    save_model,
)

KINDS = [("sequence_ranker", "hstu"), ("sequence_ranker", "transformer"), ("deep_cross_attention", "hstu"),
         ("deep_cross_attention", "transformer"), ("sequence_dcnv2", "hstu"),
         *((kind, "hstu") for kind in ("dlrm", "dcnv2", "rdcn", "wukong", "isolated_wukong", "final_mlp",
                                       "isolated_final_mlp", "dhen", "isolated_dhen"))]


def build(kind, encoder="hstu", seed=0):
    torch.manual_seed(seed)
    return make_model(config(kind, encoder), FEATURES, encoders())


@pytest.mark.parametrize(("kind", "encoder"), KINDS)
def test_maps_a_batch_to_logits_and_learns(kind, encoder):
    model = build(kind, encoder)
    batch = make_batch([5, 0, 20, 1], [3, 2, 0, 4])
    logits = model(batch)
    assert logits.shape == (9, 2) and torch.isfinite(logits).all()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(60):
        loss = ranking_loss(model(batch), batch, FEATURES.tasks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    dead = [name for name, p in model.named_parameters() if p.grad is None]
    assert not dead, f"no gradient ever reached {dead}"


@pytest.mark.parametrize("histories", [[0, 0], []])
@pytest.mark.parametrize(("kind", "encoder"), KINDS)
def test_empty_histories_and_no_requests(kind, encoder, histories):
    model = build(kind, encoder).eval()
    batch = make_batch(histories, [2] * len(histories))
    assert model(batch).shape == (2 * len(histories), 2)


def test_masked_labels_count_for_nothing():
    batch = make_batch([5, 3], [4, 4])
    logits = torch.zeros(8, 2, requires_grad=True)
    ranking_loss(logits, batch, FEATURES.tasks).backward()
    assert (logits.grad[~batch.label_mask["like"], 0] == 0).all()
    assert (logits.grad[batch.label_mask["like"], 0] != 0).all()


@pytest.mark.parametrize(("kind", "encoder"), [*KINDS, ("next_item", "hstu"), ("next_item", "transformer")])
def test_saved_and_loaded_gives_the_same_outputs(kind, encoder, tmp_path):
    model = build(kind, encoder).eval()
    batch = make_batch([5, 0, 20], [3, 2, 1])
    version = save_model(tmp_path, model, config(kind, encoder), FEATURES, "m")
    artifact = load_model(tmp_path)
    assert artifact.version == version and version.startswith("m-")
    assert artifact.kind == ("next_item" if kind == "next_item" else "ranking")
    assert artifact.features == FEATURES and artifact.config == config(kind, encoder)
    assert torch.equal(artifact.model(batch), model(batch))
    assert save_model(tmp_path, build(kind, encoder, seed=1), config(kind, encoder), FEATURES, "m") != version
    assert torch.equal(load_model(tmp_path, version).model(batch), model(batch))  # the version before is still there


def test_the_last_versions_stay_and_are_found_by_name(tmp_path):
    batch, saved = make_batch([5, 0, 20], [3, 2, 1]), []
    for seed in range(5):
        model = build("dlrm", seed=seed).eval()
        saved.append((save_model(tmp_path, model, config("dlrm"), FEATURES, "m", keep=3), model))
    kept = model_versions(tmp_path)
    assert [one.version for one in kept] == [version for version, _ in saved[2:]]
    assert [one.number for one in kept] == [3, 4, 5] and len(list(tmp_path.glob("*.safetensors"))) == 3
    for version, model in saved[2:]:
        assert torch.equal(load_model(tmp_path, version).model(batch), model(batch))
    assert current_version(tmp_path) == saved[-1][0]
    with pytest.raises(FileNotFoundError, match=f"does not keep model {saved[0][0]}; it has m-"):
        load_model(tmp_path, saved[0][0])
    again, model = saved[2]
    assert save_model(tmp_path, model, config("dlrm"), FEATURES, "m", keep=3) == again  # the same weights: the latest
    assert [one.version for one in model_versions(tmp_path)] == [saved[3][0], saved[4][0], again]
    with pytest.raises(ValueError, match="keep must be at least 1"):
        save_model(tmp_path, model, config("dlrm"), FEATURES, "m", keep=0)


def test_the_cost_of_a_version_does_not_grow_with_how_many_are_kept(tmp_path, monkeypatch):
    saved = [save_model(tmp_path, build("dlrm", seed=seed), config("dlrm"), FEATURES, "m", 9) for seed in range(8)]
    reads, read_text = [], Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path, *given: reads.append(path.name) or read_text(path, *given))
    assert load_model(tmp_path, saved[3]).version == saved[3]
    assert len(reads) == 2  # the latest, and the one that is named
    assert len(model_versions(tmp_path)) == 8
    reads.clear()
    save_model(tmp_path, build("dlrm", seed=8), config("dlrm"), FEATURES, "m", 9)
    assert len(model_versions(tmp_path)) == 9 and len(reads) == 1  # the new one
    for path in tmp_path.glob("model-*.json"):  # what was changed is read again, whatever was known of it
        path.write_text(path.read_text() + " {")
    with pytest.raises(ValueError, match="damaged"):
        model_versions(tmp_path)


def test_a_missing_unknown_or_damaged_model_is_one_clear_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no model"):
        load_model(tmp_path)
    save_model(tmp_path, build("dlrm"), config("dlrm"), FEATURES)
    described = json.loads((tmp_path / "model.json").read_text())
    weights = tmp_path / described["weights"]
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="does not fit"):
        load_model(tmp_path)
    (tmp_path / "model.json").write_text(json.dumps({**described, "format_version": 99}))
    with pytest.raises(ValueError, match="format version 99"):
        load_model(tmp_path)
    (tmp_path / "model.json").write_text("{")
    with pytest.raises(ValueError, match="damaged"):
        load_model(tmp_path)


def test_next_item_scores_items_as_it_scores_candidates():
    model = build("next_item").eval()
    batch = make_batch([5, 0, 20], [3, 3, 3])
    ids = torch.tensor([4, 7, 1000])
    batch.candidate["item_id"] = ids.repeat(3)
    everything = model.score_items(batch, ids)
    torch.testing.assert_close(model(batch).view(3, 3), everything)
    assert torch.isfinite(everything).all()


def test_next_item_learns_a_cycle():
    torch.manual_seed(0)
    model = build("next_item")
    items = (torch.arange(60) % 6 + 1).repeat(4)
    offsets = torch.arange(0, 241, 60)
    history = JaggedTable({"event_time": torch.arange(240) * 10**6, "item_id": items, "rating": torch.ones_like(items)},
                          offsets)
    g = torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(80):
        loss = model.loss(history, g)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    request = RequestBatch(torch.arange(4), {"history": history, "as_of": torch.full((4,), 61 * 10**6)}, {},
                           torch.zeros(5, dtype=torch.int64))
    best = model.score_items(request, torch.arange(1, 40)).argmax(1) + 1
    assert best.tolist() == [1, 1, 1, 1]  # 60 = 10 cycles, so 1 comes next


@pytest.mark.parametrize(("changes", "message"), [
    ({"kind": "resnet"}, "none of sequence_ranker, dlrm"),
    ({"kind": "dhen", "members": ("cross", "cross")}, "each once"),
    ({"kind": "dhen", "members": ("convolution",)}, "must be some of cross"),
    ({"kind": "dhen", "members": ()}, "got none"),
    ({"kind": "rdcn", "request_width": 0.0}, "request_width must be above 0"),
    ({"kind": "wukong", "fm_rank": 0}, "fm_rank must be at least 1"),
])
def test_impossible_configurations_are_one_clear_error(changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)


def test_models_that_the_features_do_not_fit_are_one_clear_error():
    bare = replace(FEATURES, request=())
    for kind in ("rdcn", "isolated_wukong", "isolated_final_mlp", "final_mlp", "isolated_dhen", "deep_cross_attention"):
        with pytest.raises(ValueError, match="request features or a history"):
            make_model(config(kind, history=False), bare, encoders())
    shallow = config("deep_cross_attention")
    with pytest.raises(ValueError, match=r"encoder.layers of at least 1"):
        make_model(replace(shallow, encoder=replace(shallow.encoder, layers=0)), FEATURES, encoders())
    with pytest.raises(ValueError, match="not a multiple of fusion_heads 3"):
        make_model(config("final_mlp", fusion_heads=3), FEATURES, encoders())
    with pytest.raises(ValueError, match="without a window"):
        EncoderConfig(prefix=2)


def test_a_model_saved_before_it_had_these_options_is_read(tmp_path):
    model = build("dcnv2").eval()
    save_model(tmp_path, model, config("dcnv2"), FEATURES)
    described = json.loads((tmp_path / "model.json").read_text())
    for name in ("interaction_layers", "block_fields", "fm_rank", "fm_hidden", "members", "fusion_heads", "queries",
                 "request_width", "candidate_width"):
        del described["config"][name]
    for name in ("window", "prefix"):
        del described["config"]["encoder"][name]
    (tmp_path / "model.json").write_text(json.dumps(described))
    batch = make_batch([5, 0], [3, 2])
    assert torch.equal(load_model(tmp_path).model(batch), model(batch))
