"""bench.ep_modelled: the computation of its page."""

import json
import random

import pytest

from nvfp4_cute.bench import ep_modelled
from nvfp4_cute.bench.ep_modelled import LINKS, MODELS_HERE, PHASES, Share, layer_us, phase_us
from nvfp4_cute.bench.moe import Model
from nvfp4_cute.gpus import targets


def test_expected_goals_and_experts_are_those_of_drawn_routings():
    model, ranks, tokens, dice = Model(16, 3, 64, 32), 4, 5, random.Random(0)
    goals = experts = 0
    draws = 2000
    for _ in range(draws):
        routings = [dice.sample(range(model.experts), model.top_k) for _ in range(ranks * tokens)]
        goals += sum(len({e // 4 for e in ids} - {0}) for ids in routings[:tokens]) / tokens
        experts += len({e for ids in routings for e in ids if e < 4})
    share = Share(model, ranks, tokens)
    assert share.goals == pytest.approx(goals / draws, rel=0.02)
    assert share.experts == pytest.approx(experts / draws, rel=0.02)


def test_bytes_and_operations():
    share = Share(Model(8, 2, 64, 32), 2, 10)
    assert share.row_bytes == 64 / 2 + 64 / 16 + 8
    assert share.link_bytes("give") == 10 * 2 / 2 * 128
    assert share.flops("products") == 20 * 2 * 3 * 64 * 32


@pytest.mark.parametrize("name", LINKS)
def test_more_tokens_take_longer(name):
    target = targets.lookup(name)
    for model in MODELS_HERE.values():
        us = [layer_us(Share(model, 8, tokens), target) for tokens in ep_modelled.TOKENS]
        assert us == sorted(us)
        assert us[0] == pytest.approx(sum(phase_us(phase, Share(model, 8, 1), target) for phase in PHASES))


def test_the_committed_page_is_what_is_computed():
    measured = json.loads((ep_modelled.RESULTS / "h100x2_ep.json").read_text())
    assert (ep_modelled.RESULTS / ep_modelled.PAGE).read_text() == ep_modelled.page(measured)
