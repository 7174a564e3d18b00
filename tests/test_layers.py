import keras
import numpy as np
import pytest

import mgpu_tf
from mgpu_tf import ConfigurationError, layers

TABLE = np.arange(44.0, dtype="float32").reshape(11, 4)
IDS = np.array([[0, 1, 10], [5, 5, 3]])


def filled(**options):
    layer = layers.ShardedEmbedding(11, 4, **options)
    layer.build()
    for index, shard in enumerate(layer.shards):
        shard.assign(TABLE[index :: len(layer.shards)])
    return layer


@pytest.mark.parametrize("num_shards", [None, 1, 2, 3, 11, 20])
def test_lookup(num_shards):
    layer = filled(num_shards=num_shards)
    np.testing.assert_array_equal(layer(IDS), TABLE[IDS])
    np.testing.assert_array_equal(layer.embeddings, TABLE)
    assert len(layer.shards) == min(num_shards or 1, 11)


@pytest.mark.parametrize(("saved", "loaded"), [(1, 3), (3, 2), (2, 1)])
def test_saved_and_loaded_as_one_table(saved, loaded, tmp_path):
    models = [
        keras.Sequential(
            [
                keras.Input((3,), dtype="int32"),
                layers.ShardedEmbedding(11, 4, num_shards=count),
            ]
        )
        for count in (saved, loaded)
    ]
    path = str(tmp_path / "model.weights.h5")
    models[0].save_weights(path)
    models[1].load_weights(path)
    np.testing.assert_array_equal(models[1](IDS), models[0](IDS))
    whole = str(tmp_path / "model.keras")
    models[0].save(whole)
    again = keras.models.load_model(whole)
    np.testing.assert_array_equal(again(IDS), models[0](IDS))


def test_trains_like_an_embedding(strategies):
    results = []
    for make in (
        lambda: layers.ShardedEmbedding(11, 4, num_shards=3),
        lambda: keras.layers.Embedding(11, 4),
    ):

        def build(make=make):
            model = keras.Sequential([keras.Input((3,), dtype="int32"), make()])
            model.compile(keras.optimizers.SGD(0.5), "mse")
            return model

        trainer = mgpu_tf.Trainer(build, strategies["one_device"])
        (layer,) = trainer.model.layers
        if isinstance(layer, layers.ShardedEmbedding):
            for index, shard in enumerate(layer.shards):
                shard.assign(TABLE[index::3])
        else:
            layer.set_weights([TABLE])
        target = np.ones((2, 3, 4), "float32")
        trainer.fit(IDS, target, batch_size=2, epochs=3, verbose=0)
        results.append(trainer.predict(IDS, verbose=0))
    np.testing.assert_allclose(*results, rtol=1e-6)


def test_id_out_of_range():
    with pytest.raises(Exception, match="An id must be less than input_dim"):
        filled()(np.array([11]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input_dim": 0, "output_dim": 4}, "Received: input_dim=0"),
        ({"input_dim": 3, "output_dim": 1.5}, "Received: output_dim=1.5"),
        (
            {"input_dim": 3, "output_dim": 4, "num_shards": 0},
            "Received: num_shards=0",
        ),
    ],
)
def test_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        layers.ShardedEmbedding(**options)
