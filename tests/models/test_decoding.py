"""Routers and attention of transformers' models: the same results in fewer launches."""

import copy
import json

import pytest
import torch

pytest.importorskip(
    "transformers", reason="transformers is not installed; make test-transformers installs it"
)

from transformers import StaticCache  # noqa: E402

from nvfp4_cute.bench.models.random_model import config_of, random_model  # noqa: E402
from nvfp4_cute.models import attention  # noqa: E402
from nvfp4_cute.models import transformers as ours  # noqa: E402
from nvfp4_cute.models.router import Routing, routing_of  # noqa: E402

SIZES = {
    "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "vocab_size": 128,
}  # fmt: skip
EXPERTS = {
    "qwen3_moe": {"moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": False},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2, "layer_types": ["sliding_attention", "full_attention"]},
}  # fmt: skip
ROUTINGS = {
    "qwen3_moe": Routing(2, renormalizes=False, rounds=True),
    "mixtral": Routing(2, renormalizes=True, rounds=False),
    "gpt_oss": Routing(2, renormalizes=True, rounds=True),
}


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def model_of(tmp_path, kind, **options):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": kind} | SIZES | EXPERTS.get(kind, {})))
    torch.manual_seed(0)
    return random_model(config_of(str(path)), "16bit", "cpu", **options)


@pytest.mark.parametrize("kind", EXPERTS)
def test_routers(tmp_path, kind):
    """Logits, weights and ids equal transformers' own, also in a copy and with other weights."""
    model = model_of(tmp_path, kind)
    routers = [m for m in model.modules() if type(m).__name__.endswith("TopKRouter")]
    assert len(routers) == 2
    for router in (routers[0], copy.deepcopy(routers[1])):
        routing, tried = router.forward.func, router.forward.args[0]
        assert tried is router and routing == ROUTINGS[kind]
        x = torch.randn(40, 128).bfloat16()
        router.weight.normal_()
        logits, weights, ids = router(x)
        expected = type(router).forward(router, x)
        assert torch.equal(logits, expected[0])
        # topk may order equal logits either way, so the logits of the ids are compared.
        assert torch.equal(logits.gather(1, ids.long()), logits.gather(1, expected[2]))
        assert all(len(set(row)) == len(row) for row in ids.tolist())
        torch.testing.assert_close(weights, expected[1], rtol=2**-7, atol=0)


def test_other_routers_are_left(tmp_path):
    model = model_of(tmp_path, "mixtral", fuse=False)
    router = copy.deepcopy(model.model.layers[0].mlp.gate)
    assert routing_of(router) == ROUTINGS["mixtral"]

    class Other(type(router)):
        def forward(self, x):
            logits, weights, ids = super().forward(x)
            return logits, weights * 2, ids

    router.__class__ = Other
    assert routing_of(router) is None
    assert routing_of(torch.nn.Linear(4, 4)) is None


def test_grouped_attention(tmp_path, monkeypatch):
    """Logits of every step equal those with transformers' sdpa, without its copy per head in older versions."""
    model = model_of(tmp_path, "qwen3")
    calls, product = [], torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda q, k, *rest, **options: calls.append((q.shape, k.shape)) or product(q, k, *rest, **options),
    )
    ids = torch.randint(0, 128, (3, 9))
    logits = {}
    for name in ("sdpa", attention.GROUPED):
        model.set_attn_implementation(name)
        cache, calls[:] = StaticCache(config=model.config, max_cache_len=16), []
        given, found = ids, []
        for _ in range(4):
            found.append(model(given, use_cache=True, past_key_values=cache).logits[:, -1:])
            given = torch.full_like(ids[:, :1], len(found))
        logits[name] = torch.cat(found, 1)
        of_own = (3, 2, 2, 32), (3, 2, 16, 32)
        assert calls[-1] == of_own or (name == "sdpa" and calls[-1] == ((3, 4, 1, 32), (3, 4, 16, 32)))
    torch.testing.assert_close(logits["sdpa"], logits[attention.GROUPED], rtol=2**-6, atol=2**-8)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_compiled_steps(tmp_path, kind):
    """A step of a fused model is one graph, with the bits of an eager step."""
    model = model_of(tmp_path, kind)
    model.set_attn_implementation(attention.GROUPED)
    ids = torch.randint(0, 128, (2, 5))
    found = []
    for is_compiled in (False, True):
        torch.compiler.reset()
        cache = StaticCache(config=model.config, max_cache_len=12)
        model(ids, use_cache=True, past_key_values=cache)
        step = torch.compile(model.forward, fullgraph=True, backend="aot_eager") if is_compiled else model
        given = [torch.full((2, 1), number) for number in range(3)]
        found.append([step(x, use_cache=True, past_key_values=cache).logits for x in given])
    assert all(map(torch.equal, *found))


def test_the_attention_is_registered():
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    assert ALL_ATTENTION_FUNCTIONS[attention.GROUPED] is attention.grouped_sdpa and ours.NAME
