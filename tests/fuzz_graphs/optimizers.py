"""Updates of optimizers, dense and sparse: what each takes."""

from program import lit

# The variables beside the first, numbers, and switches.
SPARSE_UPDATES = {
    "SparseApplyAdagrad": (("accum",), ("lr",), ("update_slots",)),
    "SparseApplyAdagradV2": (("accum",), ("lr", "epsilon"), ("update_slots",)),
    "SparseApplyMomentum": (("accum",), ("lr", "momentum"), ("use_nesterov",)),
    "SparseApplyFtrl": (("accum", "linear"), ("lr", "l1", "l2", "lr_power"), ("multiply_linear_by_lr",)),
    "SparseApplyFtrlV2": (("accum", "linear"), ("lr", "l1", "l2", "l2_shrinkage", "lr_power"), ("multiply_linear_by_lr",)),
    "SparseApplyRMSProp": (("ms", "mom"), ("lr", "rho", "momentum", "epsilon"), ()),
    "SparseApplyAdadelta": (("accum", "accum_update"), ("lr", "rho", "epsilon"), ()),
}
MORE_SPARSE_UPDATES = {
    "SparseApplyCenteredRMSProp": (("mg", "ms", "mom"), ("lr", "rho", "momentum", "epsilon"), ()),
    "SparseApplyProximalAdagrad": (("accum",), ("lr", "l1", "l2"), ()),
    "SparseApplyProximalGradientDescent": ((), ("alpha", "l1", "l2"), ()),
    "SparseApplyAdagradDA": (("gradient_accumulator", "gradient_squared_accumulator"), ("lr", "l1", "l2", "global_step"), ()),
}
DENSE_UPDATES = {
    **{op.replace("Sparse", ""): takes for op, takes in {**SPARSE_UPDATES, **MORE_SPARSE_UPDATES}.items()},
    "ApplyAdam": (("m", "v"), ("beta1_power", "beta2_power", "lr", "beta1", "beta2", "epsilon"), ("use_nesterov",)),
    "ApplyAdaMax": (("m", "v"), ("beta1_power", "lr", "beta1", "beta2", "epsilon"), ()),
    "ApplyAddSign": (("m",), ("lr", "alpha", "sign_decay", "beta"), ()),
    "ApplyPowerSign": (("m",), ("lr", "logbase", "sign_decay", "beta"), ()),
}
# With resource variables, there are these as well.
ONLY_RESOURCE_SPARSE = {"ResourceSparseApplyKerasMomentum": SPARSE_UPDATES["SparseApplyMomentum"]}
ONLY_RESOURCE_DENSE = {
    "ResourceApplyKerasMomentum": DENSE_UPDATES["ApplyMomentum"],
    "ResourceApplyAdamWithAmsgrad": (("m", "v", "vhat"), ("beta1_power", "beta2_power", "lr", "beta1", "beta2", "epsilon"), ()),
}


def sparse_updates(g, is_ref):
    """Returns what a seed may use."""
    return of_variables({**SPARSE_UPDATES, **(MORE_SPARSE_UPDATES if "optimizers" in g.features else {})}, is_ref, ONLY_RESOURCE_SPARSE)


def dense_updates(is_ref):
    return of_variables(DENSE_UPDATES, is_ref, ONLY_RESOURCE_DENSE)


def of_variables(known, is_ref, more):
    return known if is_ref else {**{f"Resource{op}": takes for op, takes in known.items()}, **more}


def slots_for(g, state, count):
    """Other variables like this one, for an optimizer to keep its sums in, or fewer if there are too few."""
    kind = state.kind
    found = [one for one in g.states if one is not state and one.kind is kind and (one.dev, one.dtype, one.shape) == (state.dev, state.dtype, state.shape)]
    while len(found) < count and len(g.scopes) == 1:
        found.append(kind.made(g, state.dev, state.dtype, state.shape))
    return g.rng.sample(found, min(count, len(found)))


def number_for(g, name):
    """A setting of an optimizer, seldom one that it refuses: not beside a failure, as nothing orders the two."""
    if "failure" not in g.features and g.chance(0.004):
        return g.rng.choice((-2, 0, 3))
    if name == "lr_power":
        return g.rng.choice((-0.5, -0.5, -0.5, 0, -1))
    if name.startswith("beta"):
        return g.rng.choice((0.9, 0.999, 0.5, 0))
    return g.rng.choice((0.1, 0.3, 1, 2)) if name == "lr" else g.rng.choice((0, 0.01, 0.7, 3))


def update(g, known, state, gradient):
    """Returns (op, slots by name, what it takes besides variables, attributes). Without an op if there are no slots to be had."""
    op = g.rng.choice(list(known))
    names, numbers, switches = known[op]
    slots = dict(zip(names, slots_for(g, state, len(names))))
    if len(slots) < len(names):
        return None, None, None, None
    ins = dict(gradient)
    for name in numbers:
        ins[name] = lit("int64", g.rng.choice((1, 2, 100))) if name == "global_step" else lit(state.dtype, number_for(g, name))
    if op.endswith("ProximalGradientDescent") and "indices" not in ins:
        ins["delta"] = ins.pop("grad")
    return op, slots, ins, {"use_locking": g.chance(0.5), **{name: g.chance(0.5) for name in switches}}
