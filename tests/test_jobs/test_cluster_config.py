"""The section `cluster:`: valid sizes, and environment variables that workers may get."""

import pytest

from data.errors import ConfigError
from jobs.cluster_config import ClusterConfig, WorkerRange

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(("field", "value"), [("workers", 0), ("cpus_per_worker", 0), ("gpus_per_worker", -1)])
def test_invalid_size_is_refused(field, value) -> None:
    with pytest.raises(ConfigError, match=f"{field} is {value}, expected"):
        ClusterConfig(**{field: value})


def test_a_range_of_workers_allows_every_number_in_it_the_largest_first() -> None:
    some = ClusterConfig(workers=WorkerRange(least=2, most=4))
    assert (some.least, some.most) == (2, 4)
    assert list(some.worlds) == [4, 3, 2]


def test_single_number_of_workers_allows_only_itself() -> None:
    three = ClusterConfig(workers=3)
    assert (three.least, three.most, three.world) == (3, 3, 3)
    assert list(three.worlds) == [3]


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("AWS_SECRET_ACCESS_KEY", "abc", r"looks like a secret \(by its name\)"),
        ("WANDB_API_KEY", "abc", r"looks like a secret \(by its name\)"),
        ("PROXY", "http://me:pass@proxy:8080", r"looks like a secret \(by its value\)"),
        ("WHO", "AKIA" + "A1B2C3D4E5F6G7H8", r"looks like a secret \(by its value\)"),
        ("NCCL DEBUG", "INFO", "is not a variable name"),
        ("RANK", "0", "must not be set here"),
        ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1", "Patchline sets it for workers on CPUs"),
    ],
)
def test_variable_with_a_secret_or_of_a_rank_is_refused(name, value, reason) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        ClusterConfig(environment={name: value})
    assert value == "0" or value not in str(caught.value), "the message is printed and stored"


def test_variables_without_secrets_are_accepted() -> None:
    ClusterConfig(environment={"TOKENIZERS_PARALLELISM": "false", "NCCL_SOCKET_IFNAME": "^lo,docker0", "P": "a:b@c"})
