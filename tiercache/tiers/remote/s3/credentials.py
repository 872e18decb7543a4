"""Whose requests these are: settings, then the environment, then the profile, then what the instance or pod has.

The client itself knows environment variables, web identities, containers and instances; profiles are read here.
"""

from __future__ import annotations

import configparser
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiercache.tiers.remote.base import RemoteSettings

_ELABORATE = ("sso_session", "sso_start_url", "role_arn", "credential_process", "web_identity_token_file")


@dataclass(frozen=True)
class Identity:
    """`provider` gives credentials when the client asks, None leaves it to the client. `source` is for messages."""

    source: str
    provider: Callable[[], dict[str, Any]] | None = field(default=None, repr=False)
    anonymous: bool = False
    region: str | None = None
    """That the profile names."""


def identity_of(settings: RemoteSettings) -> Identity:
    """Blocks: reads files. Raises ConfigError."""
    options = settings.options
    profile = _Profile(settings)
    key, secret = options.get("access_key_id"), options.get("secret_access_key")
    if options.get("skip_signature"):
        return Identity("nobody (skip_signature)", anonymous=True, region=profile.region)
    if key and secret:
        # Handed over by a call and not as settings: those would be mixed with AWS_SESSION_TOKEN of somebody else's.
        return Identity("the settings", _fixed(key, secret, options.get("session_token")), region=profile.region)
    if key or secret:
        missing = "secret_access_key" if key else "access_key_id"
        raise settings.error(missing, "access_key_id and secret_access_key are given together or not at all")
    if os.environ.get("AWS_ACCESS_KEY_ID") and not os.environ.get("AWS_PROFILE"):
        return Identity("the environment", region=profile.region)
    return Identity(f"profile {profile.name}", profile.provider(), region=profile.region)


def _fixed(key: str, secret: str, token: str | None) -> Callable[[], dict[str, Any]]:
    return lambda: {"access_key_id": key, "secret_access_key": secret, "token": token, "expires_at": None}


class _Profile:
    """What the AWS files say under the name in AWS_PROFILE, or `default`."""

    def __init__(self, settings: RemoteSettings) -> None:
        self._settings = settings
        self._asked_for = os.environ.get("AWS_PROFILE", "")
        self.name = self._asked_for or "default"
        self._values: dict[str, str] = {}
        self._found = False
        title = self.name if self.name == "default" else f"profile {self.name}"
        for variable, usual, section in (
            ("AWS_CONFIG_FILE", "config", title),
            ("AWS_SHARED_CREDENTIALS_FILE", "credentials", self.name),
        ):
            path = Path(os.environ.get(variable) or Path.home() / ".aws" / usual)
            parser = configparser.RawConfigParser()
            try:
                parser.read(path)
            except configparser.Error:
                raise settings.error("access_key_id", f"{path} is not of the shape of AWS files") from None
            if parser.has_section(section):
                self._found = True
                self._values |= dict(parser.items(section))

    @property
    def region(self) -> str | None:
        return self._values.get("region")

    def provider(self) -> Callable[[], dict[str, Any]] | None:
        """None: there is no such profile, or nothing of credentials in it."""
        if self._asked_for and not self._found:
            raise self._settings.error(
                "access_key_id", f"AWS_PROFILE names the profile {self.name!r}, which the AWS files do not have"
            )
        key, secret = self._values.get("aws_access_key_id"), self._values.get("aws_secret_access_key")
        if key and secret:
            return _fixed(key, secret, self._values.get("aws_session_token"))
        if not any(name in self._values for name in _ELABORATE):
            return None
        try:
            import boto3.session
            from obstore.auth.boto3 import Boto3CredentialProvider
        except ImportError:
            raise self._settings.error(
                "access_key_id",
                f"the profile {self.name!r} gets its credentials by a process, a role or single sign-on, which takes boto3: "
                "pip install boto3",
            ) from None
        try:
            provider: Callable[[], dict[str, Any]] = Boto3CredentialProvider(
                boto3.session.Session(profile_name=self.name)
            )
            return provider
        except Exception as error:  # of many libraries, and with what they were given in their messages
            raise self._settings.error(
                "access_key_id", f"boto3 has no credentials for the profile {self.name!r} ({type(error).__name__})"
            ) from None
