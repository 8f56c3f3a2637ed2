"""The preference model of a simulated site: the exact probability of every click, and clicks drawn from it.

    logit = intercept + surface + user bias + item quality + <user factors, item factors>
            - age_decay * log(1 + item age in days) - position_decay * log(1 + position)
            + affinity * log(1 + A[user, topic of the item])

``A`` counts the user's clicks by topic and is multiplied by ``0.5 ** (1 / affinity_half_life)`` at each view: what a
user clicked lately decides what it clicks next, which only a model that reads histories can know.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from semel.batch import offsets_of
from semel.datasets.site import DAY_US, Items, Requests, Users

if TYPE_CHECKING:
    from semel.datasets.simulate import SimulationConfig


def static_logits(config: SimulationConfig, users: Users, items: Items, requests: Requests,
                  candidates: np.ndarray) -> np.ndarray:
    """[R, K] the part of the logit that depends neither on the position nor on earlier clicks."""
    logits = np.empty(candidates.shape, dtype=np.float64)
    surface = np.array([surface.bias for surface in config.surfaces])
    for low in range(0, len(requests), 1 << 15):  # keeps the [rows, K, D] product small
        rows = slice(low, low + (1 << 15))
        item, user = candidates[rows], requests.user[rows]
        taste = np.einsum("rd,rkd->rk", users.factors[user], items.factors[item])
        age = (requests.as_of[rows, None] - items.created[item]) / DAY_US
        logits[rows] = (config.intercept + surface[requests.surface[rows], None] + users.bias[user, None]
                        + items.quality[item] + config.taste * taste - config.age_decay * np.log1p(age))
    return logits


def choose_shown(rng: np.random.Generator, config: SimulationConfig, logits: np.ndarray) -> np.ndarray:
    """[R, K] the order in which the site ranks its candidates: by their static logits, blurred by Gumbel noise. What is
    shown is therefore not a random sample, as in a real log."""
    return np.argsort(-(config.policy * logits + rng.gumbel(size=logits.shape)), axis=1, kind="stable")


def draw_clicks(rng: np.random.Generator, config: SimulationConfig, requests: Requests, logits: np.ndarray,
                topic: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``logits``, ``topic`` [R, S] of the shown items by position -> clicks [R, S] bool and their probabilities [R, S].

    A user's requests depend on each other, so they are walked in order: first all users' first requests, then all
    second ones, ..., each step for all users that are still there at once.
    """
    per_user = np.bincount(requests.user, minlength=config.users)
    by_count = np.argsort(-per_user, kind="stable")  # users with more requests first: each step is a prefix
    place = np.empty(config.users, dtype=np.int64)
    place[by_count] = np.arange(config.users)
    active = np.searchsorted(-per_user[by_count], -np.arange(per_user.max()), side="left")  # users at step s
    step_start = offsets_of(active)
    step = np.arange(len(requests)) - offsets_of(per_user)[requests.user]
    row_of = np.empty(len(requests), dtype=np.int64)  # step-major row -> request
    row_of[step_start[step] + place[requests.user]] = np.arange(len(requests))

    slots = np.arange(logits.shape[1])
    shown = slots < requests.shown[row_of, None]
    base = logits[row_of] - config.position_decay * np.log1p(slots)
    kinds = topic[row_of]
    draws = rng.random(base.shape)
    decay = 0.5 ** (requests.shown[row_of] / config.affinity_half_life)
    probability = np.zeros(base.shape)
    click = np.zeros(base.shape, dtype=bool)
    counts = np.zeros((config.users, config.topics))
    rows = np.arange(config.users)
    for s, users in enumerate(active):
        now = slice(step_start[s], step_start[s + 1])
        seen, kind = counts[:users], kinds[now]
        logit = base[now] + config.affinity * np.log1p(seen[rows[:users, None], kind])
        chance = 1.0 / (1.0 + np.exp(-logit))
        hit = (draws[now] < chance) & shown[now]
        probability[now], click[now] = chance, hit
        seen *= decay[now, None]
        for slot in slots:  # one row a user and slot: no two additions meet
            seen[rows[:users], kind[:, slot]] += hit[:, slot]
    out_click, out_probability = np.empty_like(click), np.empty_like(probability)
    out_click[row_of], out_probability[row_of] = click, probability
    return out_click, out_probability
