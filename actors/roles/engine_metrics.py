"""An engine's own metrics over HTTP, from the process that it runs in: Concord neither reads nor renames them."""

from prometheus_client import generate_latest

from rollout.config import EngineConfig, VllmConfig
from rollout.errors import UserError
from rollout.transport.scrape_server import ScrapeServer


def serve_engine_metrics(engine: EngineConfig, host: str) -> str:
    """Serve what the engine keeps in prometheus_client's own registry, on a free port until the process ends; answers
    with host:port.

    An engine without metrics, and a config that does not ask for them, answers with nothing.

    Raises:
        UserError: the host is no address of this node.
    """
    if not isinstance(engine, VllmConfig) or not engine.serve_metrics:
        return ""
    try:
        return ScrapeServer(host, 0, generate_latest).target(_own_address)
    except OSError as cause:
        raise UserError(
            f"cannot serve vLLM's metrics on {host}: {cause.strerror or cause}; set exporter.host to an address of "
            "every node, such as 0.0.0.0, or engine.serve_metrics to false"
        ) from cause


def _own_address() -> str:
    """The address by which other nodes reach this one."""
    from ray.util import get_node_ip_address

    return str(get_node_ip_address())
