"""The bucket and the credentials of an S3 tier, from its settings, the environment and the AWS files.

A bucket is written `s3://bucket/prefix`, or `s3://bucket.endpoint` as LMCache does.
"""

from __future__ import annotations

import configparser
import ipaddress
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from tiercache.tiers.remote.base import RemoteSettings

_AMAZON = re.compile(r"(?P<bucket>.+)\.s3(express-[a-z0-9-]+)?[.-](?P<region>[a-z0-9-]+)\.amazonaws\.com(\.cn)?")
_AMAZON_GLOBAL = re.compile(r"(?P<bucket>.+)\.s3\.amazonaws\.com")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,62}")
_NEEDS_BOTO3 = ("sso_session", "sso_start_url", "role_arn", "credential_process", "web_identity_token_file")


@dataclass(frozen=True)
class S3Address:
    """A bucket and its endpoint. Holds no secrets."""

    bucket: str
    prefix: str
    """Beginning of all names, without slashes around it; may be empty."""
    endpoint: str | None
    """A URL, which contains the bucket if `virtual_hosted`; None for Amazon's endpoint, or the environment's."""
    virtual_hosted: bool | None
    """None means virtual-hosted at Amazon, and the bucket in the path elsewhere."""
    region: str | None

    def __str__(self) -> str:
        where = f" at {self.endpoint}" if self.endpoint else ""
        return f"s3://{self.bucket}{'/' if self.prefix else ''}{self.prefix}{where}"


@dataclass(frozen=True)
class Identity:
    """The credentials of the requests."""

    source: str
    """Origin of the credentials, for messages."""
    provider: Callable[[], dict[str, Any]] | None = field(default=None, repr=False)
    """Called by the client for credentials; None if the client finds them by itself."""
    anonymous: bool = False
    region: str | None = None
    """Region in the profile."""


def read_address(settings: RemoteSettings) -> S3Address:
    """Parse the URL and the options. Raises ConfigError, which does not repeat the URL, since that may hold secrets."""
    options = settings.options
    try:
        url = urlsplit(settings.url or str(options.get("url") or ""))
        _ = url.port
    except ValueError:
        raise settings.error("url", "this is no URL; write s3://bucket/prefix") from None
    if url.scheme != "s3" or not url.netloc:
        raise settings.error("url", "this names no bucket; write s3://bucket/prefix")
    if "@" in url.netloc:
        raise settings.error("url", "credentials do not belong here; use access_key_id and secret_access_key")
    if url.query or url.fragment:
        raise settings.error("url", "an S3 URL has no ? and no #; other settings have keys of their own")
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
    elif (server := _host_behind_bucket(url.netloc)) is not None:
        bucket = url.netloc.partition(".")[0]
        virtual_hosted = not _is_ip_address(server) if wanted is None else wanted
        endpoint = f"{'http' if allow_http else 'https'}://{f'{bucket}.' if virtual_hosted else ''}{server}"
    if not _BUCKET.fullmatch(bucket):
        raise settings.error("url", "this is no name of a bucket; write s3://bucket/prefix, and the server as endpoint")
    parts = [*_names(settings, "url", url.path), *_names(settings, "prefix", str(options.get("prefix", "tiercache")))]
    return S3Address(bucket, "/".join(parts), endpoint, virtual_hosted, region)


def _names(settings: RemoteSettings, option: str, path: str) -> list[str]:
    """Split a path. Refuse names that the client does not accept, since they would fail every request."""
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


def _host_behind_bucket(netloc: str) -> str | None:
    """Return the host of LMCache's `bucket.host:port`; None if `netloc` is a bucket alone."""
    host = netloc.partition(".")[2]
    name, _, port = host.rpartition(":") if ":" in host else (host, "", "")
    return host if name and (port or "." in name or name == "localhost") else None


def _is_ip_address(host: str) -> bool:
    name = host.rpartition(":")[0] or host
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return name == "localhost"
    return True


def read_identity(settings: RemoteSettings) -> Identity:
    """Find the credentials: in the settings, then the environment, then the profile of the AWS files.

    The client itself finds credentials of web identities, containers and instances. Reads files: call it in a thread.
    Raises ConfigError.
    """
    options = settings.options
    named = os.environ.get("AWS_PROFILE", "")
    profile = _read_profile(settings, named or "default")
    region = (profile or {}).get("region")
    key, secret = options.get("access_key_id"), options.get("secret_access_key")
    if options.get("skip_signature"):
        return Identity("no credentials (skip_signature)", anonymous=True, region=region)
    if key and secret:
        # The client would add an AWS_SESSION_TOKEN of other credentials to keys in its options, not to a provider's.
        return Identity("the settings", _fixed(key, secret, options.get("session_token")), region=region)
    if key or secret:
        missing = "secret_access_key" if key else "access_key_id"
        raise settings.error(missing, "access_key_id and secret_access_key are given together or not at all")
    if os.environ.get("AWS_ACCESS_KEY_ID"):
        return Identity("the environment", region=region)
    if named and profile is None:
        raise settings.error(
            "access_key_id", f"AWS_PROFILE names the profile {named!r}, which the AWS files do not have"
        )
    source, profile = f"profile {named or 'default'}", profile or {}
    key, secret = profile.get("aws_access_key_id"), profile.get("aws_secret_access_key")
    if key and secret:
        return Identity(source, _fixed(key, secret, profile.get("aws_session_token")), region=region)
    if not any(option in profile for option in _NEEDS_BOTO3):
        return Identity(source, region=region)
    try:
        import boto3.session
        from obstore.auth.boto3 import Boto3CredentialProvider

        provider = Boto3CredentialProvider(boto3.session.Session(profile_name=named or "default"))
    except ImportError:
        raise settings.error(
            "access_key_id",
            f"the {source} gets its credentials by a process, a role or single sign-on, which takes boto3: "
            "pip install boto3",
        ) from None
    except Exception as error:  # many libraries raise here, with secrets in their messages
        raise settings.error(
            "access_key_id", f"boto3 has no credentials for the {source} ({type(error).__name__})"
        ) from None
    return Identity(source, provider, region=region)


def _fixed(key: str, secret: str, token: str | None) -> Callable[[], dict[str, Any]]:
    return lambda: {"access_key_id": key, "secret_access_key": secret, "token": token, "expires_at": None}


def _read_profile(settings: RemoteSettings, name: str) -> dict[str, str] | None:
    """Return the values of a profile in the AWS files; None if neither file has it."""
    values: dict[str, str] | None = None
    title = name if name == "default" else f"profile {name}"
    for variable, usual, section in (
        ("AWS_CONFIG_FILE", "config", title),
        ("AWS_SHARED_CREDENTIALS_FILE", "credentials", name),
    ):
        path = os.path.expanduser(os.environ.get(variable) or f"~/.aws/{usual}")
        parser = configparser.RawConfigParser()
        try:
            parser.read(path)
        except (configparser.Error, UnicodeDecodeError):
            raise settings.error("access_key_id", f"{path} does not have the form of AWS files") from None
        if parser.has_section(section):
            values = (values or {}) | dict(parser.items(section))
    return values
