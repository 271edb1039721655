"""Which layers of a family see the whole context where its configuration has no ``layer_types``.

Owns these rules. Each takes a layer's index and the number of layers.
"""


def always(*_: int) -> bool:
    return True


def never(*_: int) -> bool:
    return False


def first_of_four(index: int, *_: int) -> bool:
    return index % 4 == 0


def sixth_or_last(index: int, layers: int) -> bool:
    return index % 6 == 5 or index == layers - 1


def first_two_and_every_fourth(index: int, layers: int) -> bool:
    return index < 2 or index % 4 == 1 or index == layers - 1
