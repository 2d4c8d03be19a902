"""JAX-Privacy: seconds a step with its clipped gradients, and of ordinary JAX.

Models are plain functions of a list or dictionary of arrays; every step is jitted, with
its state donated, as one would write it in JAX.
"""

import jax
import jax.numpy as jnp
import jax_privacy
import optax
import turns
from jax_privacy import noise_addition

# Whether vmap over the batch or over parts of it is faster depends on the model.
MICROBATCH = 32


def dense(key, inputs: int, outputs: int) -> dict:
    """Parameters of a dense layer."""
    scale = (2.0 / (inputs + outputs)) ** 0.5
    return {
        "w": scale * jax.random.normal(key, (inputs, outputs)),
        "b": jnp.zeros(outputs),
    }


def apply(layer: dict, x):
    """A dense layer."""
    return x @ layer["w"] + layer["b"]


def mlp_parameters(key):
    """784-256-256-10."""
    keys = jax.random.split(key, 3)
    sizes = [(784, 256), (256, 256), (256, 10)]
    return [dense(k, *size) for k, size in zip(keys, sizes, strict=True)]


def mlp(layers, x):
    """As in speed.py."""
    for layer in layers[:-1]:
        x = jax.nn.relu(apply(layer, x))
    return apply(layers[-1], x)


def cnn_parameters(key):
    """Six convolutions and two dense layers."""
    keys = iter(jax.random.split(key, 8))
    filters, before = [], 3
    for channels in (32, 32, 64, 64, 128, 128):
        scale = (2.0 / (9 * (before + channels))) ** 0.5
        kernel = scale * jax.random.normal(next(keys), (3, 3, before, channels))
        filters.append({"w": kernel, "b": jnp.zeros(channels)})
        before = channels
    return filters, [dense(next(keys), 2048, 128), dense(next(keys), 128, 10)]


def cnn(parameters, x):
    """As in speed.py."""
    filters, layers = parameters
    for index, layer in enumerate(filters):
        x = jax.lax.conv_general_dilated(
            x, layer["w"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jax.nn.relu(x + layer["b"])
        if index % 2:
            x = jax.lax.reduce_window(
                x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"
            )
    x = x.reshape(len(x), -1)
    return apply(layers[1], jax.nn.relu(apply(layers[0], x)))


def lstm_parameters(key):
    """Embedding 64, LSTM 64 and a dense layer."""
    keys = jax.random.split(key, 4)
    return {
        "tokens": 0.05 * jax.random.normal(keys[0], (turns.VOCABULARY, 64)),
        "inputs": dense(keys[1], 64, 256),
        "state": dense(keys[2], 64, 256)["w"],
        "last": dense(keys[3], 64, 2),
    }


def lstm(parameters, tokens):
    """As in speed.py."""
    # The products with the inputs in one, as cuDNN, PyTorch and Keras do.
    inputs = apply(parameters["inputs"], parameters["tokens"][tokens])

    def cell(carry, x):
        hidden, memory = carry
        gates = jnp.split(x + hidden @ parameters["state"], 4, axis=-1)
        keep, write, show = (jax.nn.sigmoid(gate) for gate in gates[:3])
        memory = keep * memory + write * jnp.tanh(gates[3])
        return (show * jnp.tanh(memory), memory), None

    zeros = jnp.zeros((len(tokens), 64))
    (hidden, _), _ = jax.lax.scan(cell, (zeros, zeros), inputs.swapaxes(0, 1))
    return apply(parameters["last"], hidden)


def norm_parameters(width: int) -> dict:
    """Parameters of a layer normalisation."""
    return {"scale": jnp.ones(width), "b": jnp.zeros(width)}


def norm(layer: dict, x):
    """Layer normalisation."""
    x = x - x.mean(-1, keepdims=True)
    x = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-12)
    return layer["scale"] * x + layer["b"]


def bert_parameters(key, width=256, inner=1024):
    """An encoder of 4 layers."""
    keys = iter(jax.random.split(key, 64))

    def table(rows):
        return 0.02 * jax.random.normal(next(keys), (rows, width))

    def block():
        names = ("query", "key", "value", "out")
        return {name: dense(next(keys), width, width) for name in names} | {
            "up": dense(next(keys), width, inner),
            "down": dense(next(keys), inner, width),
            "norms": [norm_parameters(width) for _ in range(2)],
        }

    return {
        "tokens": table(turns.VOCABULARY),
        "positions": table(turns.TOKENS),
        "segments": table(2),
        "norm": norm_parameters(width),
        "blocks": [block() for _ in range(4)],
        "pooler": dense(next(keys), width, width),
        "last": dense(next(keys), width, 2),
    }


def bert(parameters, tokens, heads=4):
    """As in speed.py: 4 layers, pooled first token, no dropout."""
    x = parameters["tokens"][tokens] + parameters["positions"]
    x = norm(parameters["norm"], x + parameters["segments"][0])

    def split(y):
        return y.reshape(*y.shape[:-1], heads, -1)

    for block in parameters["blocks"]:
        parts = [split(apply(block[part], x)) for part in ("query", "key", "value")]
        seen = jax.nn.dot_product_attention(*parts).reshape(x.shape)
        x = norm(block["norms"][0], x + apply(block["out"], seen))
        y = apply(block["down"], jax.nn.gelu(apply(block["up"], x), approximate=False))
        x = norm(block["norms"][1], x + y)
    return apply(parameters["last"], jnp.tanh(apply(parameters["pooler"], x[:, 0])))


MODELS = {
    "cnn": (cnn_parameters, cnn),
    "mlp": (mlp_parameters, mlp),
    "lstm": (lstm_parameters, lstm),
    "bert": (bert_parameters, bert),
}


def loss_of(name: str):
    """Mean loss of a batch; JAX-Privacy calls it with batches of one record."""

    def loss(parameters, x, y):
        logits = MODELS[name][1](parameters, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    return loss


def stepper(name: str, x, y, gradients, privatizer):
    """Returns a function that makes one jitted step with these gradients."""
    optimizer = optax.adam(turns.RATE)
    x, y = jnp.asarray(x), jnp.asarray(y)

    def update(state, x, y):
        parameters, moments, noise = state
        loss, found = gradients(parameters, x, y)
        found, noise = privatizer.update(found, noise)
        found, moments = optimizer.update(found, moments, parameters)
        return loss, (optax.apply_updates(parameters, found), moments, noise)

    update = jax.jit(update, donate_argnums=0)
    parameters = MODELS[name][0](jax.random.key(0))
    state = parameters, optimizer.init(parameters), privatizer.init(parameters)

    def step():
        nonlocal state
        loss, state = update(state, x, y)
        jax.block_until_ready(state)
        return float(loss)

    return step


def ordinary(name: str):
    """Returns a maker of ordinary steps."""

    def make(x, y):
        return stepper(name, x, y, jax.value_and_grad(loss_of(name)), optax.identity())

    return make


def private(name: str, microbatch: int | None, noise: float = turns.NOISE):
    """Returns a maker of private steps."""

    def make(x, y):
        clipped = jax_privacy.clipped_grad(
            loss_of(name),
            l2_clip_norm=turns.CLIP,
            normalize_by=len(x),
            batch_argnums=(1, 2),
            return_values=True,
            microbatch_size=microbatch,
        )

        def gradients(parameters, x, y):
            found, rest = clipped(parameters, x, y)
            return rest.values.mean(), found

        privatizer = noise_addition.gaussian_privatizer(
            stddev=noise * clipped.sensitivity(), prng_key=jax.random.key(1)
        )
        return stepper(name, x, y, gradients, privatizer)

    return make


def ways(name: str) -> dict:
    """Makers for a model, ordinary training first."""
    if name not in MODELS:
        return {}
    return {
        "JAX (jit)": ordinary(name),
        "clipped_grad (jit)": private(name, None),
        f"clipped_grad (jit), microbatches of {MICROBATCH}": private(name, MICROBATCH),
    }


if __name__ == "__main__":
    turns.run(["jax-privacy", "jax"], ways)
