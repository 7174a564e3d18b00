"""Reinforcement learning from outside: the loop is the author's own."""

import keras
import numpy as np
import tensorflow as tf
from keras import ops

import mgpu_tf
from tests.conformance import models, outside
from tests.conformance.harness import row
from tests.conformance.outside import learn, mlp

GROUP = "Outside: loops of one's own"


def adam(rate=0.01):
    return keras.optimizers.Adam(rate)


def loop(run, build, *steps):
    """Runs steps over batches, as a plain loop and by `mgpu_tf.Loop`.

    Args:
        run: The `Run`.
        build: Returns models and optimizers by their names.
        *steps: Pairs of a function of objects and a batch, and its batches.
    """
    if run.strategy is None:
        keras.utils.set_random_seed(0)
        objects = build()

        def call(step, batch):
            batch = tf.nest.map_structure(tf.convert_to_tensor, batch)
            return compiled[step](batch)

        compiled = {
            step: tf.function(lambda batch, step=step: step(objects, batch))
            for step, _ in steps
        }
    else:
        made = mgpu_tf.Loop(build, run.strategy, seed=0)
        objects, call = made.objects, made.run
    logs = {}
    for _ in range(2):
        for step, batches in steps:
            for batch in batches:
                for name, value in call(step, batch).items():
                    logs.setdefault(name, []).append(float(value))
    for name, values in logs.items():
        run.see(f"history {name}", values)
    for name, found in objects.items():
        for index, variable in enumerate(found.variables):
            kind = name if isinstance(found, keras.Model) else f"slot {name}"
            run.see(f"{kind} {index}", variable)


def built(optimizer, *networks):
    optimizer.build([v for n in networks for v in n.trainable_variables])
    return optimizer


def parts(*arrays, size=outside.BATCH):
    """Batches of arrays, as a buffer's owner cuts them."""
    starts = range(0, len(arrays[0]), size)
    return [tuple(a[i : i + size] for a in arrays) for i in starts]


def transitions(actions=1):
    """States, actions, rewards, next states."""
    state, after = outside.points(), outside.points(seed=8)
    action = np.tanh(outside.numbers(actions))
    return state, action, state[:, :1] * action[:, :1], after


def follow(target, source, rate=0.05):
    for old, new in zip(target.weights, source.weights, strict=True):
        old.assign(new * rate + old * (1.0 - rate))


@row(GROUP)
def ddpg(run):
    """keras.io's: an actor through a critic, and two slow copies."""

    def build():
        actor, critic = mlp(1, 4, activation="tanh"), mlp(1, 5)
        target_actor = keras.models.clone_model(actor)
        target_critic = keras.models.clone_model(critic)
        target_actor.set_weights(actor.get_weights())
        target_critic.set_weights(critic.get_weights())
        return {
            "actor": actor,
            "critic": critic,
            "target_actor": target_actor,
            "target_critic": target_critic,
            "actor_optimizer": built(adam(), actor),
            "critic_optimizer": built(adam(0.02), critic),
        }

    def update(of, batch):
        state, action, reward, after = batch
        with tf.GradientTape() as tape:
            chosen = of["target_actor"](after, training=True)
            value = of["target_critic"](
                tf.concat([after, chosen], 1), training=True
            )
            wanted = reward + 0.9 * value
            found = of["critic"](tf.concat([state, action], 1), training=True)
            critic_loss = tf.reduce_mean(tf.square(wanted - found))
        learn(
            of["critic_optimizer"],
            tape,
            critic_loss,
            of["critic"].trainable_variables,
        )
        with tf.GradientTape() as tape:
            chosen = of["actor"](state, training=True)
            value = of["critic"](tf.concat([state, chosen], 1), training=True)
            actor_loss = -tf.reduce_mean(value)
        learn(
            of["actor_optimizer"],
            tape,
            actor_loss,
            of["actor"].trainable_variables,
        )
        follow(of["target_actor"], of["actor"])
        follow(of["target_critic"], of["critic"])
        return {"critic": critic_loss, "actor": actor_loss}

    loop(run, build, (update, parts(*transitions())))


@row(GROUP)
def ppo(run):
    """keras.io's: advantages of the whole buffer, ratios that are clipped."""

    def build():
        actor, critic = mlp(3, 4), mlp(1, 4)
        return {
            "actor": actor,
            "critic": critic,
            "policy_optimizer": built(adam(), actor),
            "value_optimizer": built(adam(), critic),
        }

    def chance(logits, action):
        log = ops.log_softmax(logits)
        return ops.sum(ops.one_hot(action, 3, dtype=log.dtype) * log, axis=1)

    def policy(of, batch):
        state, action, before, advantage = batch
        mean, spread = ops.mean(advantage), ops.std(advantage)
        advantage = (advantage - mean) / (spread + 1e-6)
        with tf.GradientTape() as tape:
            ratio = ops.exp(chance(of["actor"](state), action) - before)
            least = ops.where(advantage > 0, 1.2 * advantage, 0.8 * advantage)
            loss = -ops.mean(ops.minimum(ratio * advantage, least))
        learn(
            of["policy_optimizer"], tape, loss, of["actor"].trainable_variables
        )
        kl = ops.mean(before - chance(of["actor"](state), action))
        return {"policy": loss, "kl": ops.sum(kl)}

    def value(of, batch):
        state, returned = batch
        with tf.GradientTape() as tape:
            gap = returned - of["critic"](state)[:, 0]
            loss = ops.mean(gap**2)
        learn(
            of["value_optimizer"], tape, loss, of["critic"].trainable_variables
        )
        return {"value": loss}

    state = outside.points()
    before = np.full(outside.EXAMPLES, -np.log(3.0))
    advantage = outside.numbers()[:, 0]
    loop(
        run,
        build,
        (policy, parts(state, outside.kinds(), before, advantage)),
        (value, parts(state, advantage)),
    )


@row(GROUP)
def deep_q_learning(run):
    """keras.io's: values of chosen actions by one-hot masks, Huber."""

    def build():
        network = mlp(3, 4)
        target = keras.models.clone_model(network)
        target.set_weights(network.get_weights())
        optimizer = keras.optimizers.Adam(0.01, clipnorm=0.1)
        return {
            "network": network,
            "target": target,
            "optimizer": built(optimizer, network),
        }

    huber = keras.losses.Huber()

    def update(of, batch):
        state, action, reward, after, done = batch
        future = tf.reduce_max(of["target"](after), axis=1)
        wanted = reward + 0.9 * future
        wanted = wanted * (1.0 - done) - done
        masks = tf.one_hot(action, 3, dtype=wanted.dtype)
        with tf.GradientTape() as tape:
            values = of["network"](state)
            chosen = tf.reduce_sum(tf.multiply(values, masks), axis=1)
            loss = huber(wanted, chosen)
        learn(of["optimizer"], tape, loss, of["network"].trainable_variables)
        return {"loss": loss}

    def copy(of, batch):
        for old, new in zip(
            of["target"].weights, of["network"].weights, strict=True
        ):
            old.assign(new)
        return {"copied": tf.reduce_mean(batch[0])}

    state, _, reward, after = transitions()
    done = (outside.kinds() == 2).astype("float64")
    batches = parts(state, outside.kinds(), reward[:, 0], after, done)
    once = parts(np.ones((outside.BATCH, 1)))
    loop(run, build, (update, batches), (copy, once))


@row(GROUP)
def actor_critic_of_one_episode(run):
    """keras.io's: returns standardized over an episode, losses summed."""

    def build():
        body, actor, critic = mlp(6, 4), mlp(2, 6), mlp(1, 6)
        return {
            "body": body,
            "actor": actor,
            "critic": critic,
            "optimizer": built(adam(), body, actor, critic),
        }

    def update(of, batch):
        state, action, reward = batch
        returns = tf.math.cumsum(reward * 0.9, reverse=True)
        returns -= tf.reduce_mean(returns)
        returns /= tf.math.reduce_std(returns) + 1e-6
        networks = of["body"], of["actor"], of["critic"]
        with tf.GradientTape() as tape:
            common = of["body"](state)
            chances = tf.nn.softmax(of["actor"](common))
            log = tf.math.log(tf.gather(chances, action, batch_dims=1))
            value = of["critic"](common)[:, 0]
            apart = tf.stop_gradient(returns - value)
            entropy = -tf.reduce_sum(chances * tf.math.log(chances))
            gap = tf.abs(returns - value)
            huber = tf.where(gap < 1.0, 0.5 * gap**2, gap - 0.5)
            loss = tf.reduce_sum(-log * apart) + tf.reduce_sum(huber)
            loss -= 0.01 * entropy
        variables = [v for n in networks for v in n.trainable_variables]
        learn(of["optimizer"], tape, loss, variables)
        return {"loss": loss}

    data = outside.points(), outside.kinds(2), outside.numbers()[:, 0]
    loop(run, build, (update, parts(*data)))


@row(GROUP)
def soft_actor_critic(run):
    """Twin critics, a temperature that learns, three optimizers."""

    def build():
        actor = mlp(2, 4)
        critics = mlp(1, 5), mlp(1, 5)
        slow = [keras.models.clone_model(c) for c in critics]
        for old, new in zip(slow, critics, strict=True):
            old.set_weights(new.get_weights())
        heat = keras.Sequential(
            [keras.Input((1,)), keras.layers.Dense(1, use_bias=False)]
        )
        return {
            "actor": actor,
            "one": critics[0],
            "two": critics[1],
            "slow_one": slow[0],
            "slow_two": slow[1],
            "heat": heat,
            "actor_optimizer": built(adam(), actor),
            "critic_optimizer": built(adam(), *critics),
            "heat_optimizer": built(adam(), heat),
        }

    def act(of, state, noise):
        found = of["actor"](state)
        mean, log = found[:, :1], ops.clip(found[:, 1:], -3.0, 1.0)
        raw = mean + ops.exp(log) * noise
        action = ops.tanh(raw)
        chance = -0.5 * noise**2 - log - ops.log(1.0 - action**2 + 1e-6)
        return action, chance

    def update(of, batch):
        state, action, reward, after, noise = batch
        one = ops.ones((1, 1), dtype=state.dtype)
        heat = ops.exp(of["heat"](one))
        then, chance = act(of, after, noise)
        joined = ops.concatenate([after, then], axis=1)
        least = ops.minimum(of["slow_one"](joined), of["slow_two"](joined))
        wanted = reward + 0.9 * (least - heat * chance)
        joined = ops.concatenate([state, action], axis=1)
        critics = of["one"], of["two"]
        with tf.GradientTape() as tape:
            critic_loss = sum(
                ops.mean(ops.square(c(joined) - ops.stop_gradient(wanted)))
                for c in critics
            )
        learn(
            of["critic_optimizer"],
            tape,
            critic_loss,
            [v for c in critics for v in c.trainable_variables],
        )
        with tf.GradientTape() as tape:
            then, chance = act(of, state, noise)
            joined = ops.concatenate([state, then], axis=1)
            value = ops.minimum(of["one"](joined), of["two"](joined))
            actor_loss = ops.mean(heat * chance - value)
        learn(
            of["actor_optimizer"],
            tape,
            actor_loss,
            of["actor"].trainable_variables,
        )
        with tf.GradientTape() as tape:
            gap = ops.stop_gradient(chance - 1.0)
            heat_loss = -ops.mean(of["heat"](one) * gap)
        learn(
            of["heat_optimizer"],
            tape,
            heat_loss,
            of["heat"].trainable_variables,
        )
        for name in ("one", "two"):
            follow(of[f"slow_{name}"], of[name])
        return {"critic": critic_loss, "actor": actor_loss, "heat": heat_loss}

    noise = outside.points(1, 81)
    loop(run, build, (update, parts(*transitions(), noise)))


@row(GROUP)
def reinforce_with_a_running_baseline(run):
    """A baseline that each batch moves, kept in a layer's weight."""

    class Baseline(keras.Model):
        def __init__(self):
            super().__init__()
            self.value = self.add_weight(
                shape=(), initializer="zeros", trainable=False
            )
            self.built = True

    def build():
        actor = mlp(3, 4)
        return {
            "actor": actor,
            "baseline": Baseline(),
            "optimizer": built(adam(), actor),
        }

    def update(of, batch):
        state, action, reward = batch
        baseline = of["baseline"].value
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
                action, of["actor"](state)
            )
            loss = tf.reduce_mean(losses * (reward - baseline))
        learn(of["optimizer"], tape, loss, of["actor"].trainable_variables)
        baseline.assign(0.9 * baseline + 0.1 * tf.reduce_mean(reward))
        return {"loss": loss, "baseline": tf.identity(baseline)}

    data = outside.points(), outside.kinds(), outside.numbers()[:, 0]
    loop(run, build, (update, parts(*data)))


@row(GROUP)
def the_guide_to_training_from_scratch(run):
    """Keras's guide: a logits loss, penalties of layers, metrics by hand."""

    def build():
        network = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(
                    6,
                    activation="tanh",
                    activity_regularizer=keras.regularizers.L2(0.01),
                ),
                keras.layers.Dense(3),
            ]
        )
        return {
            "network": network,
            "optimizer": built(models.sgd(0.05, momentum=0.9), network),
        }

    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def update(of, batch):
        x, y = batch
        network = of["network"]
        with tf.GradientTape() as tape:
            logits = network(x, training=True)
            loss = loss_fn(y, logits)
            loss += sum(network.losses)
        gradients = tape.gradient(loss, network.trainable_weights)
        of["optimizer"].apply(gradients, network.trainable_weights)
        return {"loss": loss}

    data = outside.points(), outside.kinds()
    loop(run, build, (update, parts(*data)))
