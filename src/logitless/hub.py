"""The Hugging Face hub's clients, kept from retrying for 23 s where there is no network."""

import socket
import urllib.request
from urllib.parse import urlparse

from huggingface_hub import constants


def use_hub_cache_when_offline() -> None:
    """Keeps the hub's clients to their local cache, for the rest of the process, if the hub is out of reach."""
    if not constants.HF_HUB_OFFLINE and not _hub_is_reachable():
        constants.HF_HUB_OFFLINE = True  # the environment variable of this name has been read already


def _hub_is_reachable() -> bool:
    """Whether the hub's port opens within 3 s. Proxies are trusted."""
    if urllib.request.getproxies():
        return True
    try:
        socket.create_connection((urlparse(constants.ENDPOINT).hostname, 443), timeout=3).close()
    except OSError:
        return False
    return True
