"""Keras with ParameterServerStrategy over every protocol: the same bits as over stock gRPC. One worker, so that the steps have an order.

This is the Keras that supports the strategy: part of TensorFlow up to 2.15, the package tf-keras from 2.16 on (`make test` installs it aside).
It refuses the policy mixed_float16 with this strategy; half_precision in test_functions.py does it by hand, and mixed here has the other policy.
"""

import importlib.util
import os

import pytest

from cluster import state, tf
from metrics import star_calls
from steps import tensorflow_minor
from tensors import digest
from tf2_job import chief_call, contents


def available():
    return (2, 12) <= tensorflow_minor() < (2, 16) or importlib.util.find_spec("tf_keras") is not None


pytestmark = [pytest.mark.ours, pytest.mark.skipif(not available(), reason="needs tf-keras: make test installs it, `make bench` too")]

SHAPE = (("ps", 2), ("worker", 1))
OPTIMIZERS = ("SGD", "Adam", "Adagrad", "RMSprop", "Ftrl", "Nadam", "legacy.SGD", "legacy.Adam", "legacy.Adagrad", "legacy.Ftrl")


# In the chief's process. ----------------------------------------------------------------------------------------------


def keras():
    if importlib.util.find_spec("tf_keras") is not None:
        import tf_keras

        return tf_keras
    return tf.keras


def build(make):
    """Calls `make` in the strategy's scope, with initial values that only depend on the order of the calls."""
    keras().backend.clear_session()
    tf.random.set_seed(7)
    with state["strategy"].scope():
        return make()


def click_model():
    """Two embeddings, one in parts on both servers, and three dense layers."""
    layers = keras().layers
    ids = layers.Input((4,), dtype="int64")
    features = layers.Input((6,))

    def start(seed):
        return keras().initializers.RandomUniform(-0.5, 0.5, seed=seed)

    wide = layers.Flatten()(layers.Embedding(900, 8, embeddings_initializer=start(1))(ids))
    small = layers.Flatten()(layers.Embedding(30, 3, embeddings_initializer=start(2))(ids % 30))
    hidden = layers.Concatenate()([wide, small, features])
    for size in (16, 8):
        hidden = layers.Dense(size, activation="tanh", kernel_initializer=start(size))(hidden)
    out = layers.Dense(1, activation="sigmoid", kernel_initializer=start(3), dtype="float32")(hidden)
    return keras().Model([ids, features], out)


def batch(number):
    """The same for the same number, in graphs and outside."""
    number = tf.cast(number, tf.int64)
    ids = (tf.reshape(tf.range(64, dtype=tf.int64), (16, 4)) * 13 + number * 29) % 900
    features = tf.sin(tf.reshape(tf.range(96, dtype=tf.float32), (16, 6)) + tf.cast(number, tf.float32))
    labels = tf.cast(tf.reduce_sum(ids, 1, keepdims=True) % 3 == 0, tf.float32)
    return (ids, features), labels


def trainer(model, optimizer, metrics=()):
    """Returns what makes steps. As in TensorFlow's guide: a step is a strategy.run of a replica's function, which the coordinator schedules."""
    loss = keras().losses.BinaryCrossentropy(reduction=keras().losses.Reduction.NONE)

    @tf.function
    def step(number):
        def replica():
            inputs, labels = batch(number)
            with tf.GradientTape() as tape:
                predicted = model(inputs, training=True)
                value = tf.nn.compute_average_loss(loss(labels, predicted), global_batch_size=16)
            gradients = tape.gradient(value, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            for metric in metrics:
                metric.update_state(labels, predicted)
            return value

        return state["strategy"].reduce(tf.distribute.ReduceOp.SUM, state["strategy"].run(replica), axis=None)

    def train(steps=5, first=0):
        results = [state["coordinator"].schedule(step, args=(tf.constant(number, tf.int64),)) for number in range(first, first + steps)]
        state["coordinator"].join()
        return [digest(result.fetch()) for result in results]

    return train


def variables_of(optimizer):
    found = optimizer.variables
    return found() if callable(found) else found


def optimizer_steps(name):
    def make():
        home = keras().optimizers
        for part in name.split("."):
            home = getattr(home, part)
        # Legacy optimizers refuse to clip under a strategy.
        return click_model(), home(0.05, **({} if name.startswith("legacy.") else {"clipnorm": 1.0}))

    model, optimizer = build(make)
    return trainer(model, optimizer)(), contents([*model.weights, *variables_of(optimizer)])


def metrics():
    def make():
        found = [keras().metrics.AUC(num_thresholds=20), keras().metrics.BinaryAccuracy(), keras().metrics.MeanSquaredError()]
        return click_model(), keras().optimizers.SGD(0.1), found

    model, optimizer, found = build(make)
    train = trainer(model, optimizer, found)
    losses = train()
    values = [digest(one.result().numpy()) for one in found]
    for one in found:
        one.reset_state()
    return losses, values, train(2, 5), [digest(one.result().numpy()) for one in found]


def mixed():
    """Variables in 32 bits, layers in 16. The policy that needs no loss scale is the one that Keras allows with this strategy."""

    def make():
        keras().mixed_precision.set_global_policy("mixed_bfloat16")
        try:
            return click_model(), keras().optimizers.Adagrad(0.1)
        finally:
            keras().mixed_precision.set_global_policy("float32")

    model, optimizer = build(make)
    assert model.layers[-2].compute_dtype == "bfloat16" and {weight.dtype for weight in model.weights} == {tf.float32}
    return trainer(model, optimizer)(), contents([*model.weights, *variables_of(optimizer)])


def checkpoints():
    """Saved while training, continued, restored into new variables, continued again: twice the same."""

    def make():
        return click_model(), keras().optimizers.Adam(0.02)

    model, optimizer = build(make)
    train = trainer(model, optimizer)
    out = [train(3)]
    path = tf.train.Checkpoint(model=model, optimizer=optimizer).save(os.path.abspath("saved/model"))
    out.append(train(3, 3))
    saved = contents(model.weights)
    model, optimizer = build(make)
    train = trainer(model, optimizer)
    train(1, 50)
    tf.train.Checkpoint(model=model, optimizer=optimizer).restore(path).assert_existing_objects_matched()
    out.append(train(3, 3))
    assert out[1] == out[2] and contents(model.weights) == saved
    return out, saved


def fit(at_once):
    """Model.fit with a dataset for each worker, a metric, and a callback that may stop it."""

    def make():
        model = click_model()
        model.compile(keras().optimizers.Adagrad(0.1), loss="binary_crossentropy", metrics=["accuracy"], steps_per_execution=at_once)
        return model

    def dataset(context=None):
        return tf.data.Dataset.range(64).map(batch).repeat()

    model = build(make)
    creator = keras().utils.experimental.DatasetCreator(dataset)
    history = model.fit(creator, epochs=3, steps_per_epoch=4, verbose=0, callbacks=[keras().callbacks.EarlyStopping("loss", patience=2)])
    return {name: [digest(value) for value in values] for name, values in history.history.items()}, contents(model.weights)


def lookups():
    """Static tables and a vocabulary in the workers' input, as preprocessing layers make them."""

    def make():
        words = keras().layers.StringLookup(vocabulary=[f"w{i}" for i in range(20)])
        buckets = keras().layers.Discretization(bin_boundaries=[-0.5, 0.0, 0.5])
        table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(tf.range(40, dtype=tf.int64), tf.range(40, dtype=tf.int64) * 7 % 11), -1)
        return words, buckets, table, keras().layers.Embedding(30, 4, embeddings_initializer=keras().initializers.RandomUniform(-1.0, 1.0, seed=5))

    words, buckets, table, embedding = build(make)
    with state["strategy"].scope():
        embedding.build(None)

    def dataset():
        def parse(number):
            text = tf.strings.join(["w", tf.strings.as_string(number % 25)])
            return words(text) + buckets(tf.sin(tf.cast(number, tf.float32))[tf.newaxis])[0], table.lookup(number)

        return tf.data.Dataset.range(400).map(parse).batch(8)

    iterator = iter(state["coordinator"].create_per_worker_dataset(dataset))

    @tf.function
    def step(iterator):
        rows, found = next(iterator)
        value = tf.reduce_sum(embedding(rows), axis=1)
        for part in embedding.trainable_variables:
            part.assign_sub(part * 0.125)
        return value, found

    results = [state["coordinator"].schedule(step, args=(iterator,)) for _ in range(4)]
    state["coordinator"].join()
    return [[digest(value) for value in result.fetch()] for result in results], contents(embedding.trainable_variables)


# Tests. ---------------------------------------------------------------------------------------------------------------


def check(chiefs, way, scenario, *args):
    cluster = chiefs.cluster(way, SHAPE)
    calls = star_calls(cluster)
    chiefs.check(way, chief_call, scenario, *args, shape=SHAPE)
    assert (star_calls(cluster) > calls) == way.startswith("star_server")


# Many plain operations, those of TensorFlow's optimizers, and both for rows. test_fit trains with Adagrad; test_row_updates.py has all operations for rows.
QUICK = (("grpc++", "Adagrad"), ("star_server", "Adam"), ("star_server", "legacy.Adam"), ("star_server", "legacy.Ftrl"))
REASON = "an optimizer is a set of operations on a server, which only star calls run otherwise than TensorFlow; the two kinds of star calls run them alike"


@pytest.mark.quick(lambda of: (of["way"], of["name"]) in QUICK, reason=REASON)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(chiefs, way, name):
    check(chiefs, way, optimizer_steps, name)


REASON = "test_functions.py and test_star_functions.py run functions over all ways; test_training calls functions without a loop"
EACH_TRANSPORT = pytest.mark.quick(lambda of: of["way"] in ("grpc++", "star_server") and of.get("at_once") != 1, reason=REASON)


@EACH_TRANSPORT
@pytest.mark.parametrize("at_once", [1, 2])
def test_fit(chiefs, way, at_once):
    """With several steps at once Keras makes a loop of them, in which there are as many calls."""
    check(chiefs, way, fit, at_once)


@EACH_TRANSPORT
@pytest.mark.parametrize("scenario", [metrics, lookups, mixed], ids=lambda scenario: scenario.__name__)
def test_training(chiefs, way, scenario):
    check(chiefs, way, scenario)


@pytest.mark.quick(lambda of: of["way"] == "star_server", reason="only star calls read and write variables otherwise than TensorFlow")
def test_checkpoints(chiefs, way):
    check(chiefs, way, checkpoints)
