"""Vision from outside: detection, segmentation, mixtures, distillation."""

import keras
import numpy as np
import scipy.optimize
import tensorflow as tf
from keras import layers, ops

from tests.conformance import models, outside
from tests.conformance.harness import row
from tests.conformance.outside import learn, mlp

GROUP = "Outside: vision"


def adam(rate=0.02):
    return keras.optimizers.Adam(rate)


def classifier(width=3, loss="categorical_crossentropy", **options):
    def build():
        inputs = keras.Input((6, 6, 3))
        x = layers.Conv2D(4, 3, activation="tanh")(inputs)
        x = layers.GlobalAveragePooling2D()(x)
        x = layers.Dense(width, activation="softmax")(x)
        model = keras.Model(inputs, x)
        return models.compiled(model, loss, adam(), **options)

    return build


def _one_hot(seed=3):
    return np.eye(3)[outside.kinds(seed=seed)]


def _share(x):
    """A number in [0, 1) for each row, from the row."""
    return tf.math.floormod(tf.reduce_sum(x, axis=(1, 2, 3)), 1.0)


@row(GROUP)
def mix_up_in_the_dataset(run):
    """keras.io's: two datasets, mixed batch by batch."""

    def mix(one, two):
        (x1, y1), (x2, y2) = one, two
        share = _share(x1)
        pictures = share[:, None, None, None]
        x = x1 * pictures + x2 * (1.0 - pictures)
        return x, y1 * share[:, None] + y2 * (1.0 - share[:, None])

    one = outside.batches(outside.images(), _one_hot())
    two = outside.batches(outside.images(seed=7), _one_hot(13))
    data = tf.data.Dataset.zip((one, two)).map(mix)
    build = classifier(metrics=["accuracy"])
    outside.on_batches(run, build, data.prefetch(2))


@row(GROUP)
def cut_mix_in_the_dataset(run):
    """keras.io's: a box of another picture, row by row, then batches."""

    def cut(one, two):
        (x1, y1), (x2, y2) = one, two
        top = tf.cast(tf.math.floormod(tf.reduce_sum(x1) * 7.0, 4.0), tf.int32)
        box = tf.image.crop_to_bounding_box(x2, top, top, 2, 2)
        box = tf.image.pad_to_bounding_box(box, top, top, 6, 6)
        inside = tf.image.crop_to_bounding_box(x1, top, top, 2, 2)
        x = x1 - tf.image.pad_to_bounding_box(inside, top, top, 6, 6) + box
        share = 1.0 - 4.0 / 36.0
        return x, share * y1 + (1.0 - share) * y2

    def rows(seed):
        arrays = outside.images(seed=seed), _one_hot(seed)
        return tf.data.Dataset.from_tensor_slices(arrays).shuffle(
            44, seed=seed, reshuffle_each_iteration=False
        )

    data = tf.data.Dataset.zip((rows(6), rows(7)))
    data = data.map(cut, num_parallel_calls=2).batch(outside.BATCH)
    outside.on_batches(run, classifier(metrics=["accuracy"]), data)


class MixLayer(layers.Layer):
    """MixUp within the batch, in the model: each row with the row before."""

    def call(self, x, training=False):
        if not training:
            return x
        return 0.8 * x + 0.2 * tf.roll(x, 1, axis=0)


@row(GROUP)
def mix_up_by_a_layer(run):
    def build():
        model = keras.Sequential(
            [
                keras.Input((4,)),
                MixLayer(),
                layers.Dense(4, activation="tanh"),
                layers.Dense(1),
            ]
        )
        return models.compiled(model)

    outside.use(run, build, outside.points(), outside.numbers())


class MixStep(keras.Model):
    """CutMix within the batch, in `train_step`: rows with rows reversed."""

    def __init__(self):
        super().__init__()
        self.network = mlp(3, 4, activation="softmax")

    def call(self, x):
        return self.network(x)

    def train_step(self, data):
        x, y = data
        share = ops.sigmoid(x[:, :1])
        x = ops.concatenate([ops.flip(x, axis=0)[:, :2], x[:, 2:]], axis=1)
        y = share * y + (1.0 - share) * ops.flip(y, axis=0)
        return super().train_step((x, y))


@row(GROUP)
def cut_mix_in_the_step(run):
    def build():
        return models.compiled(MixStep(), "categorical_crossentropy", adam())

    outside.use(run, build, outside.points(), _one_hot())


class CtcLayer(layers.Layer):
    """keras.io's captcha reader: a loss for each row, added as it is."""

    def call(self, labels, logits):
        size, steps = tf.shape(labels)[0], tf.shape(logits)[1]
        loss = tf.nn.ctc_loss(
            tf.cast(labels, tf.int32),
            tf.transpose(logits, [1, 0, 2]),
            tf.fill((size,), tf.shape(labels)[1]),
            tf.fill((size,), steps),
            blank_index=-1,
        )
        self.add_loss(loss)
        return logits


@row(GROUP, floatx="float32", tolerance=1e-4)
def ocr_by_a_ctc_layer(run):
    def build():
        image = keras.Input((6, 6, 1), name="image")
        labels = keras.Input((2,), dtype="int32", name="label")
        x = layers.Conv2D(4, 3, padding="same", activation="tanh")(image)
        x = layers.Reshape((6, 24))(x)
        x = layers.Bidirectional(layers.LSTM(4, return_sequences=True))(x)
        x = layers.Dense(5)(x)
        model = keras.Model([image, labels], CtcLayer()(labels, x))
        model.compile(models.sgd(0.01), jit_compile=False)
        return model

    labels = models.random(61).integers(0, 4, (outside.EXAMPLES, 2))
    data = outside.batches(
        {"image": outside.images(channels=1), "label": labels}
    )
    outside.on_batches(run, build, data)


class AnchorLoss(keras.losses.Loss):
    """keras.io's RetinaNet: each image by its own number of anchors."""

    def __init__(self):
        super().__init__(reduction="sum_over_batch_size")

    def call(self, y_true, y_pred):
        box_labels, box = y_true[:, :, :4], y_pred[:, :, :4]
        positive = ops.cast(y_true[:, :, 4] > -1.0, y_pred.dtype)
        ignored = ops.cast(y_true[:, :, 4] == -2.0, y_pred.dtype)
        labels = ops.one_hot(ops.cast(y_true[:, :, 4], "int32"), 3)
        labels = ops.cast(labels, y_pred.dtype)
        cross = tf.nn.sigmoid_cross_entropy_with_logits(
            labels, y_pred[:, :, 4:]
        )
        chance = ops.sigmoid(y_pred[:, :, 4:])
        at = ops.where(labels == 1.0, chance, 1.0 - chance)
        focal = ops.sum((1.0 - at) ** 2 * cross, axis=-1)
        focal = ops.where(ignored == 1.0, 0.0, focal)
        gap = ops.abs(box_labels - box)
        smooth = ops.where(gap < 1.0, 0.5 * gap**2, gap - 0.5)
        boxes = ops.where(positive == 1.0, ops.sum(smooth, axis=-1), 0.0)
        count = ops.sum(positive, axis=-1)
        found = tf.math.divide_no_nan(ops.sum(focal, axis=-1), count)
        return found + tf.math.divide_no_nan(ops.sum(boxes, axis=-1), count)


@row(GROUP)
def retina_net_by_a_class_of_loss(run):
    def build():
        inputs = keras.Input((6, 6, 3))
        x = layers.Conv2D(4, 3, 2, activation="tanh")(inputs)
        heads = [layers.Conv2D(2 * width, 1) for width in (4, 3)]
        shapes = [(-1, width) for width in (4, 3)]
        parts = [
            layers.Reshape(shape)(head(x))
            for head, shape in zip(heads, shapes, strict=True)
        ]
        x = layers.Concatenate(axis=-1)(parts)
        optimizer = keras.optimizers.SGD(
            keras.optimizers.schedules.PiecewiseConstantDecay(
                [2, 4], [0.01, 0.005, 0.001]
            ),
            momentum=0.9,
        )
        model = keras.Model(inputs, x)
        return models.compiled(model, AnchorLoss(), optimizer)

    random = models.random(62)
    boxes = random.normal(size=(outside.EXAMPLES, 8, 4))
    kinds = random.integers(-2, 3, (outside.EXAMPLES, 8, 1))
    y = np.concatenate([boxes, kinds], axis=-1).astype("float64")
    outside.use(run, build, outside.images(), y)


def yolo(y_true, y_pred):
    """Cells with an object by a boolean mask, sums by the number of images."""
    size = tf.cast(tf.shape(y_true)[0], y_pred.dtype)
    there = y_true[..., 0] > 0.5
    boxes = tf.boolean_mask(y_pred[..., 1:], there)
    wanted = tf.boolean_mask(y_true[..., 1:], there)
    place = tf.reduce_sum(tf.square(boxes - wanted)) / size
    cross = tf.nn.sigmoid_cross_entropy_with_logits(
        y_true[..., 0], y_pred[..., 0]
    )
    empty = tf.boolean_mask(cross, ~there)
    full = tf.boolean_mask(cross, there)
    return 5.0 * place + tf.reduce_sum(full) / size + tf.reduce_mean(empty)


@row(GROUP)
def detection_by_cells_with_an_object(run):
    build = models.on_images(
        lambda: layers.Conv2D(4, 3, 2, padding="same", activation="tanh"),
        lambda: layers.Flatten(),
        lambda: layers.Dense(27),
        width=27,
        loss=lambda: (
            lambda y, p: yolo(
                tf.reshape(y, (-1, 3, 3, 3)), tf.reshape(p, (-1, 3, 3, 3))
            )
        ),
        optimizer=adam,
    )
    random = models.random(63)
    y = random.normal(size=(outside.EXAMPLES, 9, 3))
    y[..., 0] = y[..., 0] > 0.3
    outside.use(run, build, outside.images(), y.reshape(-1, 27))


class Detr(keras.Model):
    """Objects matched to queries by a solver, and divided by all boxes."""

    def __init__(self):
        super().__init__()
        self.body = layers.Dense(8, activation="tanh")
        self.head = layers.Dense(4 * 5)

    def call(self, x):
        return ops.reshape(self.head(self.body(x)), (-1, 4, 5))

    @staticmethod
    def match(cost, there):
        found = np.zeros(there.shape, np.int64)
        for i in range(len(cost)):
            _, columns = scipy.optimize.linear_sum_assignment(
                cost[i, : int(there[i].sum())]
            )
            found[i, : len(columns)] = columns
        return found

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        there = y["there"]
        cost = tf.reduce_sum(
            tf.abs(y["boxes"][:, :, None] - y_pred[:, None, :, :4]), axis=-1
        )
        chosen = tf.numpy_function(self.match, [cost, there], tf.int64)
        chosen = tf.ensure_shape(chosen, (None, 3))
        boxes = tf.gather(y_pred, chosen, batch_dims=1)
        gaps = tf.reduce_sum(tf.abs(boxes[..., :4] - y["boxes"]), axis=-1)
        of_boxes = tf.reduce_sum(gaps * there) / tf.reduce_sum(there)
        wanted = tf.reduce_max(
            tf.one_hot(chosen, 4, dtype=there.dtype) * there[..., None], axis=1
        )
        weight = 0.1 + 0.9 * wanted
        cross = tf.nn.sigmoid_cross_entropy_with_logits(wanted, y_pred[..., 4])
        return of_boxes + tf.reduce_sum(weight * cross) / tf.reduce_sum(weight)


@row(GROUP)
def detection_by_bipartite_matching(run):
    def build():
        return models.compiled(Detr(), None, adam())

    random = models.random(64)
    y = {
        "boxes": random.normal(size=(outside.EXAMPLES, 3, 4)),
        "there": np.sort(random.integers(0, 2, (outside.EXAMPLES, 3)), axis=1)[
            :, ::-1
        ].astype("float64"),
    }
    outside.on_batches(run, build, outside.batches(outside.points(), y))


def dice_coef(y_true, y_pred, smooth=1.0):
    """As it is most often written: all pixels of the batch in one row."""
    a, b = ops.reshape(y_true, (-1,)), ops.reshape(y_pred, (-1,))
    both = ops.sum(a * b)
    return (2.0 * both + smooth) / (ops.sum(a) + ops.sum(b) + smooth)


def iou(y_true, y_pred):
    both = ops.sum(y_true * y_pred)
    either = ops.sum(y_true) + ops.sum(y_pred) - both
    return (both + 1e-3) / (either + 1e-3)


def lovasz(y_true, y_pred):
    """The Lovasz hinge of all pixels of the batch, sorted by their errors."""
    labels = tf.reshape(y_true, (-1,))
    signs = 2.0 * labels - 1.0
    errors = 1.0 - tf.reshape(y_pred, (-1,)) * signs
    errors, order = tf.math.top_k(errors, tf.size(errors))
    labels = tf.gather(labels, order)
    total = tf.reduce_sum(labels)
    both = total - tf.cumsum(labels)
    either = total + tf.cumsum(1.0 - labels)
    jaccard = 1.0 - both / either
    steps = tf.concat([jaccard[:1], jaccard[1:] - jaccard[:-1]], axis=0)
    return tf.tensordot(tf.nn.relu(errors), tf.stop_gradient(steps), 1)


def segmentation(loss, activation="sigmoid", **options):
    def build():
        inputs = keras.Input((6, 6, 3))
        x = layers.Conv2D(4, 3, padding="same", activation="tanh")(inputs)
        y = layers.MaxPooling2D(2)(x)
        y = layers.Conv2DTranspose(4, 3, 2, padding="same")(y)
        x = layers.Concatenate()([x, y])
        x = layers.Conv2D(1, 1, activation=activation)(x)
        model = keras.Model(inputs, x)
        return models.compiled(model, loss, adam(), **options)

    return build


def _masks():
    return (outside.images(channels=1, seed=9) > 0.6).astype("float64")


@row(GROUP)
def u_net_with_a_dice_of_all_pixels(run):
    build = segmentation(
        lambda y, p: 1.0 - dice_coef(y, p), metrics=[dice_coef, iou]
    )
    outside.use(run, build, outside.images(), _masks())


@row(GROUP)
def u_net_with_cross_entropy_and_dice(run):
    def loss(y_true, y_pred):
        cross = keras.losses.binary_crossentropy(y_true, y_pred)
        return cross + 1.0 - dice_coef(y_true, y_pred)

    build = segmentation(loss, metrics=["accuracy", iou])
    outside.use(run, build, outside.images(), _masks())


@row(GROUP)
def u_net_with_a_lovasz_hinge(run):
    build = segmentation(lovasz, activation=None)
    outside.use(run, build, outside.images(), _masks())


@row(GROUP)
def u_net_with_classes_weighted_by_their_share(run):
    """Weights of pixels by the classes' counts in the batch."""

    def loss(y_true, y_pred):
        positive = ops.mean(y_true)
        cross = ops.binary_crossentropy(y_true, y_pred)
        weight = ops.where(y_true > 0.5, 1.0 - positive, positive)
        return ops.mean(weight * cross)

    outside.use(run, segmentation(loss), outside.images(), _masks())


class Orthogonal(keras.regularizers.Regularizer):
    """keras.io's PointNet: a transform's outputs should be orthogonal."""

    def __init__(self, width=3, strength=0.01):
        self.width, self.strength = width, strength
        self.eye = ops.eye(width)

    def __call__(self, x):
        x = ops.reshape(x, (-1, self.width, self.width))
        product = ops.tensordot(x, x, axes=(2, 2))
        product = ops.reshape(product, (-1, self.width, self.width))
        return ops.sum(self.strength * ops.square(product - self.eye))

    def get_config(self):
        return {"width": self.width, "strength": self.strength}


def _point_net(regularizer):
    def build():
        inputs = keras.Input((5, 3))
        x = layers.Conv1D(4, 1, activation="tanh")(inputs)
        x = layers.GlobalMaxPooling1D()(x)
        x = layers.Dense(
            9,
            kernel_initializer="zeros",
            bias_initializer=keras.initializers.Constant(np.eye(3).ravel()),
            activity_regularizer=regularizer,
        )(x)
        turned = layers.Dot(axes=(2, 1))([inputs, layers.Reshape((3, 3))(x)])
        x = layers.Conv1D(6, 1, activation="tanh")(turned)
        x = layers.GlobalMaxPooling1D()(x)
        model = keras.Model(inputs, layers.Dense(3)(x))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return models.compiled(model, loss, adam(), metrics=["accuracy"])

    return build


class OrthogonalRows(Orthogonal):
    """The same with a product for each row."""

    def __call__(self, x):
        x = ops.reshape(x, (-1, self.width, self.width))
        product = ops.matmul(x, ops.transpose(x, (0, 2, 1)))
        return ops.sum(self.strength * ops.square(product - self.eye))


@row(GROUP)
def point_net_with_a_regularizer_of_products(run):
    x = models.random(65).normal(size=(outside.EXAMPLES, 5, 3))
    outside.use(run, _point_net(Orthogonal()), x, outside.kinds())


@row(GROUP)
def point_net_with_a_regularizer_by_rows(run):
    x = models.random(65).normal(size=(outside.EXAMPLES, 5, 3))
    outside.use(run, _point_net(OrthogonalRows()), x, outside.kinds())


class Depth(keras.Model):
    """keras.io's: edges, structural likeness and L1 of depth maps."""

    def __init__(self):
        super().__init__()
        self.network = keras.Sequential(
            [
                keras.Input((12, 12, 3)),
                layers.Conv2D(4, 3, padding="same", activation="tanh"),
                layers.Conv2D(1, 3, padding="same", activation="sigmoid"),
            ]
        )
        self.tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.tracker]

    def call(self, x):
        return self.network(x)

    def calculate(self, target, made):
        dy, dx = tf.image.image_gradients(target)
        made_dy, made_dx = tf.image.image_gradients(made)
        weight_x = tf.exp(tf.reduce_mean(tf.abs(dx)))
        weight_y = tf.exp(tf.reduce_mean(tf.abs(dy)))
        edges = tf.reduce_mean(tf.abs(made_dx * weight_x)) + tf.reduce_mean(
            tf.abs(made_dy * weight_y)
        )
        likeness = tf.reduce_mean(
            1.0 - tf.image.ssim(target, made, max_val=1.0, filter_size=5)
        )
        l1 = tf.reduce_mean(tf.abs(target - made))
        return 0.85 * tf.cast(likeness, l1.dtype) + 0.1 * l1 + 0.9 * edges

    def train_step(self, data):
        x, target = data
        with tf.GradientTape() as tape:
            loss = self.calculate(target, self(x, training=True))
        learn(self.optimizer, tape, loss, self.trainable_variables)
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}

    def test_step(self, data):
        x, target = data
        self.tracker.update_state(self.calculate(target, self(x)))
        return {"loss": self.tracker.result()}


@row(GROUP, tolerance=1e-6)
def depth_by_edges_and_structural_likeness(run):
    def build():
        return models.compiled(Depth(), None, adam())

    pictures = outside.images(size=12), outside.images(12, 1, seed=7)
    outside.use(run, build, *pictures)


class ZeroDce(keras.Model):
    """keras.io's enhancer of dark pictures: four losses, no targets."""

    def __init__(self):
        super().__init__()
        self.network = keras.Sequential(
            [
                keras.Input((8, 8, 3)),
                layers.Conv2D(4, 3, padding="same", activation="tanh"),
                layers.Conv2D(6, 3, padding="same", activation="tanh"),
            ]
        )

    def call(self, x):
        curves = self.network(x)
        for i in range(2):
            part = curves[..., 3 * i : 3 * i + 3]
            x = x + part * (ops.square(x) - x)
        return x

    def losses_of(self, x):
        curves, made = self.network(x), self(x)
        vertical = tf.reduce_sum(tf.square(curves[:, 1:] - curves[:, :-1]))
        size = tf.cast(tf.shape(x)[0], curves.dtype)
        smooth = 2.0 * vertical / (7.0 * 8.0) / size
        mean = tf.reduce_mean(made, axis=(1, 2), keepdims=True)
        red, green, blue = mean[..., 0], mean[..., 1], mean[..., 2]
        color = tf.sqrt(
            (red - green) ** 4 + (red - blue) ** 4 + (blue - green) ** 4 + 1e-9
        )
        gray = tf.reduce_mean(made, axis=3, keepdims=True)
        light = tf.nn.avg_pool2d(gray, 4, 4, "VALID")
        exposure = tf.reduce_mean(tf.square(light - 0.6))
        return {
            "smooth": 2.0 * smooth,
            "color": 5.0 * tf.reduce_mean(color),
            "exposure": 10.0 * exposure,
        }

    def train_step(self, x):
        with tf.GradientTape() as tape:
            losses = self.losses_of(x)
            total = sum(losses.values())
        learn(self.optimizer, tape, total, self.network.trainable_weights)
        return losses | {"total": total}

    def test_step(self, x):
        return self.losses_of(x)


@row(GROUP)
def enhancement_of_dark_pictures(run):
    def build():
        return models.compiled(ZeroDce(), None, adam())

    pictures = 0.3 * outside.images(size=8)
    outside.on_batches(run, build, outside.batches(pictures))


class Distiller(keras.Model):
    """keras.io's latest: losses by temperature in `compute_loss`."""

    def __init__(self, student, teacher):
        super().__init__()
        self.student, self.teacher = student, teacher

    def compile(self, student_loss, distillation_loss, **options):
        super().compile(**options)
        self.student_loss_fn = student_loss
        self.distillation_loss_fn = distillation_loss

    def compute_loss(
        self,
        x=None,
        y=None,
        y_pred=None,
        sample_weight=None,
        allow_empty=False,
        training=True,
    ):
        taught = self.teacher(x, training=False)
        student = self.student_loss_fn(y, y_pred)
        distilled = self.distillation_loss_fn(
            ops.softmax(taught / 3.0, axis=1), ops.softmax(y_pred / 3.0, axis=1)
        ) * (3.0**2)
        return 0.1 * student + 0.9 * distilled

    def call(self, x):
        return self.student(x)


@row(GROUP)
def distillation_in_compute_loss(run):
    def build():
        teacher = mlp(3, 4, width=8)
        teacher.trainable = False
        model = Distiller(mlp(3, 4), teacher)
        model.compile(
            optimizer=adam(),
            metrics=[keras.metrics.SparseCategoricalAccuracy()],
            student_loss=keras.losses.SparseCategoricalCrossentropy(
                from_logits=True
            ),
            distillation_loss=keras.losses.KLDivergence(),
            jit_compile=False,
        )
        return model

    outside.use(run, build, outside.points(), outside.kinds())


class Deit(keras.Model):
    """keras.io's DeiT: two heads, one taught by the teacher's choices."""

    def __init__(self):
        super().__init__()
        self.teacher = mlp(3, 4)
        self.teacher.trainable = False
        self.body = layers.Dense(6, activation="tanh")
        self.of_class, self.of_teacher = layers.Dense(3), layers.Dense(3)
        self.student_tracker = keras.metrics.Mean(name="student_loss")
        self.distilled_tracker = keras.metrics.Mean(name="distilled_loss")

    def call(self, x, training=False):
        x = self.body(x)
        both = self.of_class(x), self.of_teacher(x)
        return both if training else (both[0] + both[1]) / 2

    def train_step(self, data):
        x, y = data
        taught = tf.nn.softmax(self.teacher(x), -1)
        with tf.GradientTape() as tape:
            by_class, by_teacher = self(x, training=True)
            student = self.compiled_loss_of(y, by_class)
            distilled = self.compiled_loss_of(
                tf.one_hot(tf.argmax(taught, -1), 3), by_teacher
            )
            loss = (student + distilled) / 2
        learn(self.optimizer, tape, loss, self.trainable_variables)
        self.student_tracker.update_state(student)
        self.distilled_tracker.update_state(distilled)
        made = (by_class + by_teacher) / 2
        return self.compute_metrics(x, y, tf.nn.softmax(made), None)

    def compiled_loss_of(self, y, y_pred):
        return keras.losses.CategoricalCrossentropy(
            from_logits=True, label_smoothing=0.1
        )(y, y_pred)


@row(GROUP)
def deit_with_two_heads(run):
    def build():
        return models.compiled(
            Deit(),
            keras.losses.CategoricalCrossentropy(from_logits=True),
            adam(),
            metrics=["accuracy"],
        )

    outside.train(run, build, outside.points(), _one_hot())


@row(GROUP)
def bags_of_instances_with_attention(run):
    """keras.io's: a list of inputs, one network, weights by attention."""

    def build():
        inputs = [keras.Input((3, 3)) for _ in range(3)]
        hidden = layers.Dense(6, activation="tanh")
        seen = [hidden(layers.Flatten()(x)) for x in inputs]
        gate, score = layers.Dense(4, activation="sigmoid"), layers.Dense(1)
        scores = [score(layers.Dense(4)(x) * gate(x)) for x in seen]
        weights = ops.softmax(ops.stack(scores, axis=0), axis=0)
        weighted = [
            layers.multiply([x, weights[i]]) for i, x in enumerate(seen)
        ]
        x = layers.concatenate(weighted)
        model = keras.Model(inputs, layers.Dense(2, activation="softmax")(x))
        return models.compiled(
            model,
            "sparse_categorical_crossentropy",
            adam(),
            metrics=["accuracy"],
        )

    random = models.random(66)
    bags = [random.normal(size=(outside.EXAMPLES, 3, 3)) for _ in range(3)]
    labels = outside.kinds(2)
    outside.use(run, build, bags, labels, class_weight={0: 0.4, 1: 1.7})


def psnr(y_true, y_pred):
    return tf.image.psnr(y_true, y_pred, max_val=1.0)


class SuperResolution(keras.Model):
    """keras.io's EDSR: PSNR as a function, and a step to predict one."""

    def __init__(self):
        super().__init__()
        self.body = layers.Conv2D(12, 3, padding="same")

    def call(self, x):
        return tf.nn.depth_to_space(self.body(x), 2)

    def predict_step(self, x):
        if isinstance(x, tuple):
            x = x[0]
        made = self(x, training=False)
        return tf.cast(tf.round(tf.clip_by_value(made, 0, 1) * 255), tf.uint8)


@row(GROUP, tolerance=1e-6)
def super_resolution_with_psnr(run):
    def build():
        return models.compiled(SuperResolution(), "mae", adam(), metrics=[psnr])

    outside.use(
        run, build, outside.images(size=3), outside.images(size=6, seed=7)
    )


@row(GROUP)
def video_with_a_mask_of_frames(run):
    """keras.io's: features and a mask of frames as two inputs."""

    def build():
        frames = keras.Input((5, 4))
        mask = keras.Input((5,), dtype="bool")
        x = layers.GRU(6, return_sequences=True)(frames, mask=mask)
        x = layers.GRU(4)(x)
        x = layers.Dense(3, activation="softmax")(x)
        return models.compiled(
            keras.Model([frames, mask], x),
            "sparse_categorical_crossentropy",
            adam(),
            metrics=["accuracy"],
        )

    random = models.random(67)
    frames = random.normal(size=(outside.EXAMPLES, 5, 4))
    lengths = random.integers(1, 6, (outside.EXAMPLES, 1))
    mask = np.arange(5) < lengths
    outside.use(run, build, [frames, mask], outside.kinds())


@row(GROUP)
def next_frames_by_conv_lstm(run):
    def build():
        inputs = keras.Input((None, 6, 6, 1))
        x = layers.ConvLSTM2D(
            3, 3, padding="same", return_sequences=True, activation="tanh"
        )(inputs)
        x = layers.LayerNormalization()(x)
        x = layers.Conv3D(1, 3, padding="same", activation="sigmoid")(x)
        model = keras.Model(inputs, x)
        return models.compiled(model, "binary_crossentropy", adam())

    frames = models.random(68).uniform(size=(outside.EXAMPLES, 4, 6, 6, 1))
    outside.use(run, build, frames[:, :-1], frames[:, 1:])


@row(GROUP)
def global_pooling_by_lambda_layers(run):
    """Lambda layers, as notebooks have them."""

    def build():
        inputs = keras.Input((6, 6, 3))
        x = layers.Conv2D(4, 3, activation="tanh")(inputs)
        x = layers.Lambda(lambda t: tf.reduce_mean(t, axis=[1, 2]))(x)
        x = layers.Lambda(lambda t: tf.math.l2_normalize(t, axis=1))(x)
        model = keras.Model(inputs, layers.Dense(3)(x))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return models.compiled(model, loss, adam())

    outside.use(run, build, outside.images(), outside.kinds())
