"""Early ranking: one product a task, items' vectors out of the tower or out of rows, the same to the bit."""

import pytest
import torch
from model_batches import FEATURES, config, encoders, make_batch

from semel.batch import RequestBatch
from semel.memory import ItemMemory
from semel.models import EarlyRanker, load_model, make_model, ranking_loss, save_model
from semel.models.early_ranker import HIT, ROW, memory_layer


def build(seed=0, **changes):
    torch.manual_seed(seed)
    return make_model(config("early_ranker", memory_rows=100, **changes), FEATURES, encoders())


def with_rows(batch, memory):
    row, hit, _ = memory.read(batch.candidate["item_id"])
    return RequestBatch(batch.request_id, batch.request, {**batch.candidate, ROW: row, HIT: hit},
                        batch.candidate_offsets)


def unique_items(batch):
    """Candidates of one item each, so that features do not differ between two of one item."""
    batch.candidate["item_id"] = torch.arange(len(batch.candidate["item_id"]))
    return batch


@pytest.mark.parametrize("fuse", ["gate", "sum", "mlp"])
def test_rows_that_training_wrote_score_as_the_tower_does(fuse):
    model = build(fuse=fuse, miss_rate=0.0)
    batch = unique_items(make_batch([5, 0, 20], [3, 2, 9]))
    trained = model.train()(batch)
    assert trained.shape == (14, 2) and len(model.item.memory) == 14
    model.eval()
    served = model(with_rows(batch, model.item.memory))
    assert torch.equal(trained, served) and torch.equal(model(batch), served)
    missed = model(with_rows(batch, ItemMemory(10, 8).eval()))
    assert torch.isfinite(missed).all() and not torch.equal(missed, served)
    assert len(model.item.memory) == 14  # eval mode writes nothing


def test_each_task_is_the_product_that_the_formula_says():
    model = build().eval()
    batch = make_batch([5, 0, 20], [3, 2, 9])
    vector, bias = model.request(batch.request)
    item = model.items(batch.candidate)
    owner = batch.candidate_to_request()
    want = torch.stack([(vector[owner[i]] @ item[i]) + bias[owner[i]] for i in range(len(item))])
    torch.testing.assert_close(model(batch), want, rtol=1e-6, atol=1e-6)


def test_every_parameter_learns_and_the_loss_falls():
    model = build(fuse="mlp")
    batch = unique_items(make_batch([5, 0, 20, 3, 8], [20, 20, 20, 20, 20], seed=1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = ranking_loss(model(batch), batch, FEATURES.tasks)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    idle = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert not idle and losses[-1] < 0.5 * losses[0]


def test_no_candidate_knows_another_and_unknown_ids_differ():
    model = build().eval()
    batch = make_batch([5, 0, 20], [3, 2, 9])
    torch.testing.assert_close(model(batch.slice(1, 3)), model(batch)[3:], rtol=1e-6, atol=1e-6)
    batch.candidate["item_id"][:] = torch.arange(10**9, 10**9 + 14)  # none of them in the vocabulary
    assert len(torch.unique(model.hashed(batch.candidate["item_id"]), dim=0)) > 1


def test_weights_are_saved_without_the_rows(tmp_path):
    model = build(miss_rate=0.0)
    batch = make_batch([5, 0, 20], [3, 2, 9])
    model.train()(batch)
    version = save_model(tmp_path, model, config("early_ranker", memory_rows=100, miss_rate=0.0), FEATURES, "m")
    loaded = load_model(tmp_path).model
    assert isinstance(loaded, EarlyRanker) and len(memory_layer(loaded).memory) == 0
    assert torch.equal(loaded(batch), model.eval()(batch))
    model.item.memory.delete([1, 2, 3])
    assert save_model(tmp_path, model, config("early_ranker", memory_rows=100, miss_rate=0.0), FEATURES, "m") == version


def test_bad_settings():
    for changes in ({"memory_rows": 0}, {"hash_buckets": 0}, {"miss_rate": 1.0}):
        (name, _), = changes.items()
        with pytest.raises(ValueError, match=f"model.{name}"):
            config("early_ranker", **changes)
