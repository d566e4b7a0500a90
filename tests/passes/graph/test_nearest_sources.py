"""The search for what a place is made from, against a walk from each place, on graphs with and without circles."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from passes.graph.traversal import NearestSources

Graph = list[list[int]]

GRAPHS = st.integers(1, 7).flatmap(
    lambda count: st.lists(st.lists(st.integers(0, count - 1), max_size=3), min_size=count, max_size=count)
)
"""For each place, the places before it: any may be on a circle, and a place may be before itself."""


def walk(graph: Graph, place: int) -> dict[int, int]:
    """Place → distance from `place`, of all that it is made from."""
    distances, front = {place: 0}, [place]
    while front:
        following = [before for reached in front for before in graph[reached] if before not in distances]
        distance = distances[front[0]] + 1
        distances.update(dict.fromkeys(following, distance))
        front = list(dict.fromkeys(following))
    return distances


@given(GRAPHS, st.permutations(range(7)), st.sets(st.integers(0, 6)))
def test_each_place_has_the_sources_of_its_own_walk(graph: Graph, asked: list[int], sources: set[int]) -> None:
    search = NearestSources[int, int](lambda place: ({place: place} if place in sources else {}, graph[place]))
    for place in (place for place in asked if place < len(graph)):
        distances = walk(graph, place)
        found = search.of(place)
        assert sorted(found) == sorted(distances.keys() & sources)
    assert search.visits == len(graph)


@given(GRAPHS, st.integers(1, 3))
def test_of_many_sources_the_nearest_are_kept(graph: Graph, most: int) -> None:
    search = NearestSources[int, int](lambda place: ({place: place}, graph[place]), most)
    for place in range(len(graph)):
        distances, kept = walk(graph, place), set(search.of(place))
        assert len(kept) >= min(most, len(distances))
        farthest = max(distances[source] for source in kept)
        assert all(distances[source] >= farthest for source in distances.keys() - kept)
