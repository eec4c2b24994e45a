"""A pytest plugin of the processes in which kernels are interpreted: their lanes, and what Triton's interpreter
repeats at every call, done once.
"""

from dataclasses import replace
from math import copysign
from numbers import Number

import pytest
from triton.language import core, semantic
from triton.runtime import interpreter

import tests.support.bare_package  # noqa: F401 (before any test imports the package)
from tests.support.covering import keep_covering_cases


def pytest_configure():
    call_functions_at_once()
    exchange_language_once()
    check_no_overflow_for_nothing()
    make_types_once()
    compare_shapes_once()
    compare_types_once()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark planted faults, their control, and cases that repeat values, before pytest selects by marks."""
    for item in items:
        if item.originalname.endswith(("is_seen", "same_check_passes", "same_checks_pass")):
            item.add_marker(pytest.mark.fault)
    keep_covering_cases([item for item in items if not item.get_closest_marker("fault")])


def exchange_language_once():
    """Exchange the functions of triton.language once for each module that functions of kernels are from, for good.

    The interpreter looks for what to exchange at every call of a function in a kernel, finds nothing after the first
    one of a module, and puts everything back after a launch: that took half of its time (measured with cProfile on
    ``triton_qk_rope.py``, Triton 3.9). Nothing in these processes needs the functions of compiled kernels.
    """
    exchange, nothing = interpreter._patch_lang, interpreter._LangPatchScope()
    exchanged_modules = set()

    def exchange_once(function):
        module = id(function.__globals__)
        if module not in exchanged_modules:
            exchanged_modules.add(module)
            exchange(function)
            # Triton 3.6 converts arrays of one element, which NumPy 2.4 refuses; later versions do as here.
            core.tensor.__index__ = lambda self: int(self.handle.data.squeeze())
        return nothing

    interpreter._patch_lang = exchange_once


def call_functions_at_once():
    """Call the functions of triton.language without what stands before them: a copy of the keywords, and the check of an
    argument that is always given here. Plain values are no constexpr, and hold none.
    """
    wrapper, unwrap = core.add.__code__, core._unwrap_if_constexpr
    plain = {core.tensor, core.dtype, bool, int, float, str, type(None)}

    def set_function(obj, name, member, builder, scope):
        function = member.__wrapped__ if getattr(member, "__code__", None) is wrapper else member

        def call(*args, **kwargs):
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return function(*args, **kwargs)

        scope.set_attr(obj, name, call)

    interpreter._patch_attr = set_function
    core._unwrap_if_constexpr = lambda value: value if type(value) in plain else unwrap(value)


def check_no_overflow_for_nothing():
    """Skip the overflow check, whose result the interpreter drops unless kernels are debugged."""
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)


def make_types_once():
    """Share one type among all blocks of its dtype and shape, and compute its properties once; types never change.

    The interpreter makes some types for every operation: a quarter of its time (measured as above).
    """
    block, value = core.block_type, core.tensor
    make_block, make_value = block.__init__, value.__init__
    blocks, values = {}, {}

    def new_block(cls, element_ty=None, shape=None):
        # A key holds what it names by its identity, which then is of nothing else.
        key = (id(element_ty), tuple(shape)) if shape is not None else None
        if key is None or key not in blocks:
            made = object.__new__(cls)
            if key is None:
                return made
            make_block(made, element_ty, shape)
            blocks[key] = made
        return blocks[key]

    def init_value(self, handle, type):
        if id(type) not in values:
            make_value(self, handle, type)
            values[id(type)] = {name: part for name, part in vars(self).items() if name != "handle"}
        self.__dict__.update(values[id(type)], handle=handle)

    block.__new__, block.__init__ = new_block, lambda self, element_ty, shape: None
    value.__init__ = init_value
    interpreter._get_np_dtype = by_identity(interpreter._get_np_dtype)


def compare_shapes_once():
    """Remember for two types whether their values must be broadcast, and to which type.

    The interpreter compares all shapes at every operation: a quarter of its time (measured as above).
    """
    broadcast = semantic.TritonSemantic.broadcast_impl_value
    # By the identity of two types, which the entry keeps alive.
    entries = {}

    def grow(self, value, wanted):
        if value.type is wanted:
            return value
        if value.type.is_block():
            handle = self.builder.create_broadcast(value.handle, tuple(wanted.shape))
        else:
            handle = self.builder.create_splat(wanted, value.handle)
        return self.tensor(handle, wanted)

    def broadcast_values(self, left, right):
        types = left.type, right.type
        key = id(types[0]), id(types[1])
        if key in entries:
            _, wanted = entries[key]
            return grow(self, left, wanted[0]), grow(self, right, wanted[1])
        values = broadcast(self, left, right)
        # Blocks of different ranks get their new axes from Triton each time.
        if len({len(type.shape) for type in types if type.is_block()}) == 1:
            entries[key] = types, tuple(value.type for value in values)
        return values

    semantic.TritonSemantic.broadcast_impl_value = broadcast_values


def compare_types_once():
    """Remember for two operands that their types are those of the operation, and make a constant of a number once.

    The interpreter goes through all rules of promotion at every operation: a third of its time (measured as above).
    """
    check = semantic.TritonSemantic.binary_op_type_checking_impl
    # By the identity of types, which the entry keeps alive, and the values of numbers: what is broadcast in their place.
    entries = {}

    def check_once(self, left, right, *options, **named):
        key = (_part_of(left), _part_of(right), options, *named.items())
        if key in entries:
            _, (first, second) = entries[key]
            return self.broadcast_impl_value(left if first is None else first, right if second is None else second)
        given, found = (left, right), check(self, left, right, *options, **named)
        if all(isinstance(old, Number) or old.dtype == new.dtype for old, new in zip(given, found)):
            constants = [
                self.scalar_constant(old, dtype=new.dtype) if isinstance(old, Number) else None
                for old, new in zip(given, found)
            ]
            entries[key] = [getattr(old, "type", None) for old in given], constants
        return found

    semantic.TritonSemantic.binary_op_type_checking_impl = check_once


def _part_of(operand):
    # With the sign, which zero does not show, and the type, which True does not show.
    return (type(operand), operand, copysign(1, operand)) if isinstance(operand, Number) else id(operand.type)


def by_identity(function):
    """Cache a function of one argument by the identity of the argument, which the cache keeps alive."""
    kept = {}

    def find(argument):
        if id(argument) not in kept:
            kept[id(argument)] = argument, function(argument)
        return kept[id(argument)][1]

    return find
