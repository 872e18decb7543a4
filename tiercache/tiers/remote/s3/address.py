"""Where the objects are: from what operators write, `s3://bucket/prefix` or LMCache's `s3://bucket.endpoint`."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from tiercache.tiers.remote.base import RemoteSettings

_AMAZON = re.compile(r"(?P<bucket>.+)\.s3(express-[a-z0-9-]+)?[.-](?P<region>[a-z0-9-]+)\.amazonaws\.com(\.cn)?")
_AMAZON_GLOBAL = re.compile(r"(?P<bucket>.+)\.s3\.amazonaws\.com")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,62}")


@dataclass(frozen=True)
class S3Address:
    """A bucket, and how it is reached. Holds no secrets."""

    bucket: str
    prefix: str
    """Of all names, without slashes around it; may be empty."""
    endpoint: str | None
    """A URL (with the bucket in it where that is virtual-hosted); None: Amazon's, or what the environment says."""
    virtual_hosted: bool | None
    """None: Amazon's way at Amazon, otherwise the path's."""
    region: str | None

    def __str__(self) -> str:
        where = f" at {self.endpoint}" if self.endpoint else ""
        return f"s3://{self.bucket}{'/' if self.prefix else ''}{self.prefix}{where}"


def read_address(settings: RemoteSettings) -> S3Address:
    """Raises ConfigError, which does not repeat the URL: it may hold what does not belong in a log."""
    options = settings.options
    url = _split(settings)
    endpoint = options.get("endpoint") or None
    region = options.get("region") or None
    wanted: bool | None = options.get("virtual_hosted")
    allow_http = bool(options.get("allow_http"))
    bucket, virtual_hosted = url.netloc, wanted
    amazon = _AMAZON.fullmatch(url.netloc) or _AMAZON_GLOBAL.fullmatch(url.netloc)
    if endpoint is not None:
        endpoint = _endpoint(settings, endpoint, allow_http)
        if wanted:
            scheme, _, host = endpoint.partition("://")
            endpoint = endpoint if host.startswith(f"{bucket}.") else f"{scheme}://{bucket}.{host}"
    elif amazon is not None:
        bucket = amazon["bucket"]
        region = region or amazon.groupdict().get("region")
    elif (cut := _endpoint_within(url.netloc)) is not None:
        bucket, host = cut
        virtual_hosted = not _is_address(host) if wanted is None else wanted
        scheme = "http" if allow_http else "https"
        endpoint = f"{scheme}://{bucket}.{host}" if virtual_hosted else f"{scheme}://{host}"
    if not _BUCKET.fullmatch(bucket):
        raise settings.error("url", "this is no name of a bucket; write s3://bucket/prefix, and the server as endpoint")
    parts = [*_names(settings, "url", url.path), *_names(settings, "prefix", str(options.get("prefix", "tiercache")))]
    return S3Address(bucket, "/".join(parts), endpoint, virtual_hosted, region)


def _split(settings: RemoteSettings) -> SplitResult:
    address = settings.url or str(settings.options.get("url") or "")
    try:
        url = urlsplit(address)
        _ = url.port
    except ValueError:
        raise settings.error("url", "this is no URL; write s3://bucket/prefix") from None
    if url.scheme != "s3" or not url.netloc:
        raise settings.error("url", "this names no bucket; write s3://bucket/prefix")
    if "@" in url.netloc:
        raise settings.error("url", "credentials do not belong here; use access_key_id and secret_access_key")
    if url.query or url.fragment:
        raise settings.error("url", "an S3 URL has no ? and no #; other settings have keys of their own")
    return url


def _names(settings: RemoteSettings, option: str, path: str) -> list[str]:
    """The parts of a path. What the client takes for no name would fail every request."""
    names = [part for part in path.split("/") if part]
    if any(name in (".", "..") or _CONTROL.search(name) for name in names):
        raise settings.error(option, "expected names with / between them, without '..' and control characters")
    return names


def _endpoint(settings: RemoteSettings, endpoint: str, allow_http: bool) -> str:
    if "://" not in endpoint:
        endpoint = f"{'http' if allow_http else 'https'}://{endpoint}"
    try:
        url = urlsplit(endpoint)
        usable = url.scheme in ("http", "https") and url.hostname and (url.port is None or url.port)
    except ValueError:
        usable = False
    if not usable or "@" in endpoint or url.query or url.fragment:
        raise settings.error("endpoint", "expected a URL such as https://host:port, without credentials")
    if url.scheme == "http" and not allow_http:
        raise settings.error("allow_http", f"{endpoint} is plain HTTP, which has to be allowed; or write https://")
    return endpoint.rstrip("/")


def _endpoint_within(host: str) -> tuple[str, str] | None:
    """LMCache's URL is the name of the host that requests go to, bucket and all. None: it is a bucket alone."""
    bucket, _, rest = host.partition(".")
    name, _, port = rest.rpartition(":") if ":" in rest else (rest, "", "")
    if not name or not (port or "." in name or name == "localhost"):
        return None
    return bucket, rest


def _is_address(host: str) -> bool:
    name = host.rpartition(":")[0] or host
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return name == "localhost"
    return True
