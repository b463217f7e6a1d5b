"""Treemaps: rectangles whose areas are proportional to sizes, grouped, and divided into parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

WIDTH = 1120.0
HEIGHT = 420.0
_LABEL_HEIGHT = 17.0
_GAP = 1.5
_CHAR_WIDTH = 6.7
#: The smallest rectangle that has a label.
_LEAST_LABEL_WIDTH = 40.0
_LEAST_LABEL_HEIGHT = 18.0


@dataclass(frozen=True, slots=True)
class Item:
    """A labeled size that consists of parts."""

    label: str
    #: The text to show when the pointer is on the rectangle.
    title: str
    #: The size of each part, by its kind.
    parts: Mapping[str, int]

    @property
    def size(self) -> int:
        """The size of all parts."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class Rectangle:
    """A rectangle, measured from the upper left corner."""

    x: float
    y: float
    width: float
    height: float

    @property
    def area(self) -> float:
        """Its area."""
        return self.width * self.height

    def inset(self, gap: float, top: float = 0.0) -> Rectangle:
        """Return the rectangle without a border, and without space for a label at its top."""
        return Rectangle(
            self.x + gap, self.y + gap + top, max(0.0, self.width - 2 * gap), max(0.0, self.height - 2 * gap - top)
        )


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a cell."""

    kind: str
    place: Rectangle


@dataclass(frozen=True, slots=True)
class Cell:
    """The rectangle of an item. ``label`` is empty if there is no space for it."""

    place: Rectangle
    label: str
    title: str
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """The rectangle of a group, with a label above its cells."""

    place: Rectangle
    label: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Treemap:
    """The whole drawing."""

    width: float
    height: float
    groups: tuple[Group, ...]
    #: The legend: the label of each kind that occurs.
    legend: Mapping[str, str]


def draw_treemap(groups: Sequence[tuple[str, Sequence[Item]]], kinds: Mapping[str, str]) -> Treemap:
    """Draw groups of items.

    Args:
        groups: The label and the items of each group. Items without size are left out.
        kinds: The labels of the kinds of parts, in the order in which parts are drawn.
    """
    sized = [(label, [item for item in items if item.size > 0]) for label, items in groups]
    sized = [(label, sorted(items, key=lambda item: -item.size)) for label, items in sized if items]
    sized.sort(key=lambda group: -sum(item.size for item in group[1]))
    places = squarified([sum(item.size for item in items) for _, items in sized], Rectangle(0, 0, WIDTH, HEIGHT))
    drawn = tuple(_group(label, items, place, kinds) for (label, items), place in zip(sized, places, strict=True))
    used = {kind for _, items in sized for item in items for kind, size in item.parts.items() if size}
    return Treemap(WIDTH, HEIGHT, drawn, {kind: label for kind, label in kinds.items() if kind in used})


def _group(label: str, items: Sequence[Item], place: Rectangle, kinds: Mapping[str, str]) -> Group:
    has_label = place.width >= _LEAST_LABEL_WIDTH and place.height >= 3 * _LABEL_HEIGHT
    inner = place.inset(_GAP, _LABEL_HEIGHT if has_label else 0.0)
    places = squarified([item.size for item in items], inner)
    cells = tuple(_cell(item, cell, kinds) for item, cell in zip(items, places, strict=True))
    return Group(place, _fitted(label, place.width) if has_label else "", cells)


def _cell(item: Item, place: Rectangle, kinds: Mapping[str, str]) -> Cell:
    inner = place.inset(_GAP / 2)
    parts, x = [], inner.x
    for kind in kinds:
        width = inner.width * item.parts.get(kind, 0) / item.size
        if width > 0:
            parts.append(Part(kind, Rectangle(x, inner.y, width, inner.height)))
            x += width
    has_label = inner.width >= _LEAST_LABEL_WIDTH and inner.height >= _LEAST_LABEL_HEIGHT
    return Cell(inner, _fitted(item.label, inner.width) if has_label else "", item.title, tuple(parts))


def _fitted(text: str, width: float) -> str:
    most_chars = max(1, int((width - 8) / _CHAR_WIDTH))
    return text if len(text) <= most_chars else f"{text[: most_chars - 1]}…"


def squarified(sizes: Sequence[int], place: Rectangle) -> list[Rectangle]:
    """Divide a rectangle in proportion to sizes, into rectangles that are as square as possible.

    Args:
        sizes: Positive sizes in descending order.
        place: The rectangle.

    Returns:
        A rectangle for each size, in the same order.
    """
    total = sum(sizes)
    areas = [size / total * place.area for size in sizes] if total else []
    return list(_rows(areas, place))


def _rows(areas: Sequence[float], place: Rectangle) -> Iterator[Rectangle]:
    start = 0
    while start < len(areas):
        side = min(place.width, place.height)
        end = start + 1
        total = least = most = areas[start]
        while end < len(areas):
            added = areas[end]
            joined = (total + added, min(least, added), max(most, added))
            if _worst_ratio(*joined, side) > _worst_ratio(total, least, most, side):
                break
            total, least, most = joined
            end += 1
        yield from _row(areas[start:end], total, place)
        place = _remainder(place, total)
        start = end


def _worst_ratio(total: float, least: float, most: float, side: float) -> float:
    if not total or not least or not side:
        return float("inf")
    return max(side * side * most / (total * total), total * total / (side * side * least))


def _row(areas: Sequence[float], total: float, place: Rectangle) -> Iterator[Rectangle]:
    """Yield the rectangles of a row along the shorter side."""
    is_wide = place.width >= place.height
    side = place.height if is_wide else place.width
    # Rounding may leave less space than the areas need.
    depth = min(total / side, place.width if is_wide else place.height) if side else 0.0
    at = 0.0
    for area in areas:
        length = area / total * side if total else 0.0
        if is_wide:
            yield Rectangle(place.x, place.y + at, depth, length)
        else:
            yield Rectangle(place.x + at, place.y, length, depth)
        at += length


def _remainder(place: Rectangle, total: float) -> Rectangle:
    if place.width >= place.height:
        depth = total / place.height if place.height else 0.0
        return Rectangle(place.x + depth, place.y, max(0.0, place.width - depth), place.height)
    depth = total / place.width if place.width else 0.0
    return Rectangle(place.x, place.y + depth, place.width, max(0.0, place.height - depth))
