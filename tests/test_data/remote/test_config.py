"""Impossible settings of the cache are refused."""

import pytest

from data.errors import ConfigError
from data.remote.config import CacheConfig

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("options", [{"limit_bytes": 0}, {"ahead": -1}, {"backoff_s": -0.1}, {"attempts": True}])
def test_invalid_cache_setting_is_refused_by_name(options):
    with pytest.raises(ConfigError, match=rf"cache\.{next(iter(options))} is "):
        CacheConfig(**options)
