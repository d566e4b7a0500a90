"""One valid model and a number → the bytes of a broken one. The same number gives the same bytes.

Bytes are flipped, cut, inserted; or the message is changed in one to four places: by a mutation that knows nothing of
ONNX and takes any field of any message, and by those of `onnx_changes`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from onnx import ModelProto

from benchmarks.fuzz.onnx_changes import BAD_TEXT, CHANGES, FLOATS, NUMBERS, graft, value_names, walk_messages
from benchmarks.fuzz.seeds import seed_models

BAD_BYTES = b"\xff\xfe\x80BAD\xc3\x28"
"""What takes the place of BAD_TEXT in the bytes: protobuf refuses to set it."""


@dataclass(frozen=True, slots=True)
class BrokenFile:
    """The bytes of one file, with the seed model that it was made from and how."""

    index: int
    seed_model: str
    how: str
    content: bytes


def broken_files(count: int, seed: int, first: int = 0) -> Iterator[BrokenFile]:
    """Files `first` to `first + count` of the endless list that `seed` means."""
    models = seed_models()
    names = sorted(models)
    for index in range(first, first + count):
        rng = random.Random(f"{seed}:{index}")
        name = names[index % len(names)]
        if rng.random() < 0.25:
            how, content = _broken_bytes(models[name].SerializeToString(), rng)
        else:
            how, content = _broken_structure(models, name, rng)
        yield BrokenFile(index, name, how, content)


def _broken_bytes(content: bytes, rng: random.Random) -> tuple[str, bytes]:
    broken = bytearray(content)
    how = rng.choice(("flip", "flip", "flip", "cut", "insert", "remove", "repeat", "zero"))
    at = rng.randrange(len(broken))
    size = min(rng.choice((1, 1, 2, 4, 16, 100)), len(broken) - at)
    match how:
        case "flip":
            for _ in range(rng.choice((1, 1, 2, 8))):
                broken[rng.randrange(len(broken))] ^= 1 << rng.randrange(8)
        case "cut":
            del broken[at:]
        case "insert":
            broken[at:at] = rng.randbytes(size)
        case "remove":
            del broken[at : at + size]
        case "repeat":
            broken[at:at] = broken[at : at + size]
        case "zero":
            broken[at : at + size] = bytes(size)
    return how, bytes(broken)


def _broken_structure(models: Mapping[str, ModelProto], name: str, rng: random.Random) -> tuple[str, bytes]:
    model = ModelProto()
    model.CopyFrom(models[name])
    done = []
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        if rng.random() < 0.06:
            graft(model, models[rng.choice(sorted(models))], rng)
            done.append("graft")
            continue
        change = _any_field if rng.random() < 0.45 else rng.choice(CHANGES)
        change(model, rng)
        done.append(change.__name__.strip("_"))
    return " + ".join(done), model.SerializeToString().replace(BAD_TEXT.encode(), BAD_BYTES)


def _any_field(model: ModelProto, rng: random.Random) -> None:
    """Change one field of one message, whatever they are."""
    messages = list(walk_messages(model))
    message = rng.choice(messages)
    present = [field for field, _ in message.ListFields()]
    field = rng.choice(present if present and rng.random() < 0.8 else list(message.DESCRIPTOR.fields))
    if field.is_repeated:
        _change_list(getattr(message, field.name), field, messages, rng)
    elif rng.random() < 0.15:
        message.ClearField(field.name)
    elif field.message_type is not None:
        donors = [item for item in messages if item.DESCRIPTOR is field.message_type]
        if donors:
            copy = type(donors[0])()
            copy.CopyFrom(rng.choice(donors))
            getattr(message, field.name).CopyFrom(copy)
        else:
            getattr(message, field.name).SetInParent()
    else:
        setattr(message, field.name, _scalar(field, getattr(message, field.name), messages, rng))


def _change_list(values, field: FieldDescriptor, messages: Sequence[Message], rng: random.Random) -> None:
    how = rng.choice(("drop", "repeat", "swap", "change", "add", "clear"))
    place = rng.randrange(len(values)) if values else 0
    if how == "drop" and values:
        del values[place]
    elif how == "clear":
        del values[:]
    elif how == "swap" and values:
        other = rng.randrange(len(values))
        _swap(values, place, other)
    elif field.message_type is not None:
        donors = [item for item in messages if item.DESCRIPTOR is field.message_type]
        if donors:
            copy = type(donors[0])()
            copy.CopyFrom(rng.choice(donors))
            values.append(copy)
        else:
            values.add()
    elif how == "repeat" and values:
        values.extend([values[place]] * rng.choice((1, 1, 70)))
    elif how == "change" and values:
        values[place] = _scalar(field, values[place], messages, rng)
    else:
        values.append(_scalar(field, values[place] if values else None, messages, rng))


def _swap(values, place: int, other: int) -> None:
    if isinstance(values[place], Message):
        copy = type(values[place])()
        copy.CopyFrom(values[place])
        values[place].CopyFrom(values[other])
        values[other].CopyFrom(copy)
    else:
        values[place], values[other] = values[other], values[place]


def _scalar(field: FieldDescriptor, old, messages: Sequence[Message], rng: random.Random):
    """Another value for a field that is no message."""
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        return rng.choice([value.number for value in field.enum_type.values])
    if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return rng.choice(FLOATS)
    if field.type == FieldDescriptor.TYPE_STRING:
        return rng.choice((BAD_TEXT, "", "nothing", "\0", "x" * 5000, *rng.choices(value_names(messages), k=4)))
    if field.type == FieldDescriptor.TYPE_BYTES:
        old = old or b""
        return rng.choice(
            (b"", old[:-1], old + b"\0", old[: len(old) // 2], b"\xff\xfe", rng.randbytes(max(len(old), 3)))
        )
    chosen = rng.choice((*NUMBERS, (old or 0) + 1, (old or 0) - 1))
    low, high = {
        FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
        FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    }.get(kind, (-(2**63), 2**63 - 1))
    return min(max(chosen, low), high)
