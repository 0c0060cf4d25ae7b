"""A reward function of the user's own, named `package.module:function`."""

import importlib
from typing import cast

from rollout.errors import UserError, boundary
from rollout.types.protocols import RewardFunction


def load_function(name: str) -> RewardFunction:
    """Import the function.

    Raises:
        UserError: the name has another form, the module cannot be imported, or it has no such callable.
    """
    module_name, colon, attribute = name.partition(":")
    if not (colon and module_name and attribute):
        raise UserError(f"got reward.function = {name!r}; expected package.module:function")
    cure = "the module must be importable in the reward workers: install it, or put its folder on PYTHONPATH"
    with boundary(UserError, f"cannot import {module_name!r} for reward.function = {name!r} ({cure})"):
        module = importlib.import_module(module_name)
    found: object = module
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        what = "has no such attribute" if found is None else f"is of type {type(found).__name__}"
        functions = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        raise UserError(
            f"got reward.function = {name!r}, but {module_name} {what}; its callables are: "
            f"{', '.join(functions) or 'none'}"
        )
    return cast(RewardFunction, found)
