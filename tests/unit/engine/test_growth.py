"""What of a process the soak calls growth."""

import pytest

from support import soak


@pytest.mark.parametrize("name", soak.TOLERANCE)
def test_growth_beyond_its_tolerance_is_found_whatever_grows(name: str) -> None:
    def samples(step: int) -> list[dict[str, int]]:
        return [
            dict.fromkeys(soak.TOLERANCE, 1 << 30) | {name: (1 << 30) + step * number}
            for number in range(12)
        ]

    one = soak.TOLERANCE[name] // 4 + 1
    assert soak.growth(samples(0)) == {}
    assert list(soak.growth(samples(one))) == [name]


def test_one_high_sample_and_the_first_third_are_no_growth() -> None:
    levels = [1, 2, 5, 9, 9, 9, 9, 50, 9]
    assert soak.growth([{"threads": level} for level in levels]) == {}


def test_few_samples_show_nothing() -> None:
    with pytest.raises(ValueError, match="too few"):
        soak.growth([{"threads": 1}] * 5)
