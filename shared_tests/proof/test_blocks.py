"""The transformer's reference is checked: by finite differences, by torch's and flax's own modules, and by hand."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from flax import nnx

import jax_impl.blocks
import torch_impl.blocks
from contract import blocks, reference
from contract.axes import parse_axes
from contract.problem import Batch
from contract.strategy import Run
from contract.transformer import EPSILON, Attention, Experts, Mlp, Transformer

PLAIN = Transformer(batch=2, width=4, layers=2, dtype="float64", sequence=5, heads=2, ff=6)
MIXED = replace(PLAIN, ff=3, experts=3, capacity_factor=0.8)  # a capacity of 2 tokens of 5, for 10 choices of 3 experts
each = pytest.mark.parametrize("problem", [PLAIN, MIXED], ids=["mlp", "experts"])


def dropped(problem, params, x):
    """How many choices of every layer with experts find no place."""
    counts = []
    for layer in params:
        if isinstance(layer, Experts):
            p = blocks.softmax(blocks.norm(x, layer.gain)[0] @ layer.router)
            counts.append(int(p[..., 0].size * problem.top_k - blocks.route(p, problem)[1].sum()))
        x = reference.LAYERS[type(layer)](layer, x, problem)[0]
    return counts


@each
def test_every_gradient_of_a_block_is_the_central_difference(problem):
    params, batch = problem.parameters(), problem.data(0)
    _, grads = reference.loss_and_grads(params, batch, problem)
    assert all(dropped(problem, params, batch.x))  # of no layer with experts are all tokens served
    h = 1e-5
    for number, (layer, of_layer) in enumerate(zip(params, grads, strict=True)):
        for name, tensor, got in zip(layer._fields, layer, of_layer, strict=True):
            want = np.empty_like(tensor)
            for index in np.ndindex(tensor.shape):  # perturbed in place, element by element
                value, sides = tensor[index], []
                for tensor[index] in (value + h, value - h):
                    sides.append(reference.loss_and_grads(params, batch, problem)[0])
                tensor[index] = value
                want[index] = (sides[0] - sides[1]) / (2 * h)
            np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-9, err_msg=f"{name}{number}")
            assert np.linalg.norm(got) > 1e-3, f"{name}{number}"  # not equal because both vanish


def in_torch(layer, problem):
    """The layer as torch's own modules compute it, and its leaves under the names of the reference."""
    leaves = type(layer)(*(torch.tensor(a, requires_grad=True) for a in layer))
    norm = torch.nn.RMSNorm(problem.width, eps=EPSILON, dtype=torch.float64)

    def forward(x):
        h = torch.func.functional_call(norm, {"weight": leaves.gain}, x)
        if isinstance(leaves, Mlp):
            return x + F.linear(F.gelu(F.linear(h, leaves.up.T)), leaves.down.T)
        if isinstance(leaves, Experts):
            return x + torch.stack([one_sequence(leaves, tokens, problem) for tokens in h])
        attention = torch.nn.MultiheadAttention(
            problem.width, problem.heads, bias=False, batch_first=True, dtype=torch.float64
        )
        weights = {
            "in_proj_weight": torch.cat([leaves.q.T, leaves.k.T, leaves.v.T]),
            "out_proj.weight": leaves.o.T,
        }
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        given = {"attn_mask": hidden, "is_causal": True, "need_weights": False}
        return x + torch.func.functional_call(attention, weights, (h, h, h), given)[0]

    return forward, leaves


def one_sequence(layer, tokens, problem):
    """The experts' layer as its docstring has it: one choice at a time, who comes too late gets nothing."""
    probabilities = torch.softmax(tokens @ layer.router, -1)
    gates, choices = probabilities.topk(problem.top_k)
    places, out = [problem.capacity] * problem.experts, [torch.zeros_like(token) for token in tokens]
    for choice in range(problem.top_k):
        for i, token in enumerate(tokens):
            expert = int(choices[i, choice])
            if places[expert]:
                places[expert] -= 1
                made = F.gelu(token @ layer.up[expert]) @ layer.down[expert]
                out[i] = out[i] + gates[i, choice] / gates[i].sum() * made
    return torch.stack(out)


@each
def test_the_reference_is_what_torch_s_own_modules_compute(problem):
    batch = problem.data(0)
    params = problem.parameters()
    want, grads = reference.loss_and_grads(params, batch, problem)
    layers = [in_torch(layer, problem) for layer in params]
    x, y, weight = map(torch.tensor, batch)
    for forward, _ in layers:
        x = forward(x)
    loss = (weight * (x - y).square()).sum()
    loss.backward()
    assert loss.item() == pytest.approx(want, rel=1e-13)
    for (_, leaves), of_layer in zip(layers, grads, strict=True):
        for name, leaf, grad in zip(leaves._fields, leaves, of_layer, strict=True):
            np.testing.assert_allclose(leaf.grad, grad, rtol=1e-11, atol=1e-14, err_msg=name)


def test_the_reference_is_what_flax_s_own_modules_compute():
    problem = replace(PLAIN, layers=1)
    batch, params = problem.data(0), problem.parameters()
    want, grads = reference.loss_and_grads(params, batch, problem)
    size, d = problem.width // problem.heads, problem.width

    def loss(params):
        of_module, x = {"param_dtype": jnp.float64, "dtype": jnp.float64, "rngs": nnx.Rngs(0)}, jnp.asarray(batch.x)
        for layer in params:
            norm = nnx.RMSNorm(d, epsilon=EPSILON, **of_module)
            norm.scale[...] = layer.gain
            h = norm(x)
            if isinstance(layer, Attention):
                # With a dropout, though it is off, the scores are in float64. Else they are always in float32.
                off = {"dropout_rate": 0.5, "use_bias": False, "decode": False}
                attention = nnx.MultiHeadAttention(problem.heads, d, **off, **of_module)
                for name, w in (("query", layer.q), ("key", layer.k), ("value", layer.v)):
                    getattr(attention, name).kernel[...] = w.reshape(d, problem.heads, size)
                attention.out.kernel[...] = layer.o.reshape(problem.heads, size, d)
                mask = nnx.make_causal_mask(batch.x[..., 0])
                x = x + attention(h, mask=mask, deterministic=True)
            else:
                x = x + nnx.gelu(h @ layer.up, approximate=False) @ layer.down
        return jnp.sum(batch.weight * (x - batch.y) ** 2)

    with jax.enable_x64(True):
        got, got_grads = jax.jit(jax.value_and_grad(loss))(params)
    assert float(got) == pytest.approx(want, rel=1e-13)
    for layer, of_layer in zip(got_grads, grads, strict=True):
        for name, a, b in zip(of_layer._fields, layer, of_layer, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-14, err_msg=name)


def test_a_token_does_not_see_later_ones():
    x, layer = PLAIN.data(0).x, PLAIN.parameters()[0]
    out = blocks.attention(layer, x, PLAIN)[0]
    x[:, 3:] += 1
    np.testing.assert_array_equal(blocks.attention(layer, x, PLAIN)[0][:, :3], out[:, :3])


# 3 tokens, 3 experts, 2 choices each, and one place at every expert. Tokens 0 and 1 want expert 0 first, token 2 wants
# expert 1. First choices: token 0 gets expert 0, token 1 finds it full, token 2 gets expert 1. Second choices: token 0
# finds expert 1 full, token 1 gets expert 2, token 2 finds expert 0 full.
CROWDED = Transformer(1, 3, 1, "float64", sequence=3, heads=1, ff=2, experts=3, top_k=2, capacity_factor=0.5)
PROBABILITIES = np.array([[[0.6, 0.3, 0.1], [0.5, 0.1, 0.4], [0.2, 0.7, 0.1]]])
PLACES = {(0, 0, 0): 0.6 / 0.9, (1, 1, 2): 0.4 / 0.9, (2, 0, 1): 0.7 / 0.9}  # token, choice, expert -> gate


def test_a_full_expert_drops_second_choices_before_first_and_later_tokens_before_earlier():
    assert CROWDED.capacity == 1
    _, slots = blocks.route(PROBABILITIES, CROWDED)
    assert {tuple(map(int, place)) for place in np.argwhere(slots[0, ..., 0])} == set(PLACES)
    logits = np.log(PROBABILITIES)
    with jax.enable_x64(True):
        on_sides = [torch_impl.blocks.route(torch.tensor(logits), CROWDED)]
        on_sides.append(jax_impl.blocks.route(jnp.asarray(logits), CROWDED))
    for theirs, gates in on_sides:
        np.testing.assert_array_equal(theirs, slots)
        assert [float(gates[0, t, c]) for t, c, _ in PLACES] == pytest.approx(list(PLACES.values()), rel=1e-14)


def test_a_dropped_choice_adds_nothing_and_keeps_its_share_of_the_gates():
    x = np.eye(3)[None]  # each token is a unit vector, so the router's rows can give it any probabilities
    unit = x / np.sqrt(1 / 3 + EPSILON)
    router = np.log(PROBABILITIES[0]) / unit[0, 0, 0]
    rng = np.random.default_rng(0)
    up, down = rng.standard_normal((3, 3, 2)), rng.standard_normal((3, 2, 3))
    out = blocks.experts(Experts(np.ones(3), router, up, down), x, CROWDED)[0] - x
    want = np.zeros((3, 3))
    for (token, _, expert), gate in PLACES.items():
        want[token] = gate * blocks.gelu(unit[0, token] @ up[expert])[0] @ down[expert]
    np.testing.assert_allclose(out[0], want, rtol=1e-13, atol=1e-15)


def test_the_capacity_is_that_of_one_sequence_so_samples_do_not_compete():
    layer, x = MIXED.parameters()[1], MIXED.data(0).x
    together = blocks.experts(layer, x, MIXED)[0]
    alone = [blocks.experts(layer, x[i : i + 1], MIXED)[0][0] for i in range(len(x))]
    np.testing.assert_allclose(together, alone, rtol=1e-14)
    assert [replace(MIXED, batch=batch).capacity for batch in (1, 2, 64)] == [2, 2, 2]
    assert replace(MIXED, capacity_factor=1e-3).capacity == 1, "an expert takes one token at least"


def test_sizes_of_a_block_are_free_and_every_matrix_has_its_own_scale():
    problem = Transformer(1, 64, 1, "float64", sequence=4, heads=4, ff=24, experts=3)
    attention, experts = problem.parameters()
    assert replace(problem, experts=0).shape(1) == Mlp((64,), (64, 24), (24, 64))
    assert experts.up.shape == (3, 64, 24) and experts.down.shape == (3, 24, 64) and experts.router.shape == (64, 3)
    for name in ("q", "k", "v", "o"):
        assert getattr(attention, name).std() == pytest.approx(1 / 8, rel=0.1), name
    assert experts.up.std() == pytest.approx(1 / 8, rel=0.1)
    assert experts.down.std() == pytest.approx(24**-0.5, rel=0.1)
    assert np.ptp(attention.gain) > 0.1 and not np.array_equal(attention.q, attention.k)


@pytest.mark.parametrize("mesh", ["dp=2", "fsdp=2,tp=2", "ep=2", "pp=2"])
def test_the_reference_is_one_for_all_meshes(mesh):
    run = Run("torch", (), replace(MIXED, experts=4, ff=4), steps=2, microbatches=1)
    want, got = reference.run(run), reference.run(replace(run, axes=parse_axes(mesh)))
    np.testing.assert_array_equal(got.losses, want.losses)
    np.testing.assert_array_equal(got.params[1].up, want.params[1].up)


@each
def test_tokens_of_weight_0_count_neither_in_the_loss_nor_in_a_gradient(problem):
    """Uneven token counts: a batch whose samples end early is padded, and a pad weighs nothing."""
    lengths = (3, 5)
    x, y, _ = problem.data(0)
    weight = np.zeros((2, 5, 1))
    for sample, length in enumerate(lengths):
        weight[sample, :length] = 1 / (sum(lengths) * problem.width)
    params = problem.parameters()
    loss, grads = reference.loss_and_grads(params, Batch(x, y, weight), problem)
    other = y.copy()
    other[0, 3:] = 1e3
    again, same = reference.loss_and_grads(params, Batch(x, other, weight), problem)
    assert again == loss
    for a, b in zip(grads, same, strict=True):
        for one, two in zip(a, b, strict=True):
            np.testing.assert_array_equal(one, two)
    alone = [
        np.sum((reference.forward(params, x[i : i + 1], problem)[0] - y[i : i + 1])[:, :n] ** 2)
        for i, n in enumerate(lengths)
    ]
    assert loss == pytest.approx(sum(alone) / (sum(lengths) * problem.width), rel=1e-13)
