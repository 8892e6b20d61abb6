"""Errors of the model package, by fault.

CallerError
├── ModelNotFound        no such installed or pullable model, or the path is no model folder
│   └── ModelGated       the hub gives it only to those who accepted its terms
├── UnsupportedModel     the architecture, tokenizer or tensor type is not one kvd can run
├── UnsupportedFeature   the model cannot do what the request asks (tools, chat, images)
└── TemplateRefused      the model's chat template rejects the messages
InvalidText
└── UntokenizableText    the tokenizer has no token for any byte of a text
EnvironmentFault
├── DownloadFailed       the package could not be fetched
│   ├── PipMissing       this Python has no pip
│   ├── HubUnreachable   the model hub does not answer, or offline mode is set
│   └── InstallFailed    the model folder could not be written
├── DigestMismatch       what was fetched is not what is pinned; nothing was installed
└── ModelCorrupt         a file of an installed model is unreadable
    └── ModelIncomplete  a file of an installed model is missing
"""

from __future__ import annotations

from kvd.errors import CallerError, EnvironmentFault, InvalidText


class ModelNotFound(CallerError):
    """No such model; the message lists the installed and the pullable names."""

    name = "model_not_found"


class ModelGated(ModelNotFound):
    """The hub's repository is there, but its terms have to be accepted first; the message says where."""


class UnsupportedModel(CallerError):
    """kvd cannot run this model; the message says why and lists what it can run."""

    name = "unsupported_model"


class UnsupportedFeature(CallerError):
    """The loaded model lacks what the request asks for."""

    name = "unsupported"


class TemplateRefused(CallerError):
    """The chat template raised, or did not print what it was given; the message has its reason."""

    name = "template_refused"


class UntokenizableText(InvalidText):
    """No byte of a non-empty text has a token, so nothing would stand for it."""


class DownloadFailed(EnvironmentFault):
    """Fetching failed; nothing was installed, and the same call may be repeated."""

    name = "download_failed"


class PipMissing(DownloadFailed):
    """This Python has no pip to fetch with."""


class HubUnreachable(DownloadFailed):
    """The model hub does not answer; the message has the reason, and the models that can be had without it."""


class InstallFailed(DownloadFailed):
    """The model folder could not be written (no space, no permission); the message has the system's reason."""


class DigestMismatch(EnvironmentFault):
    """The fetched file differs from the pinned digest; `data` has both."""

    name = "digest_mismatch"


class ModelCorrupt(EnvironmentFault):
    """An installed model cannot be read; the message names the file."""

    name = "model_corrupt"


class ModelIncomplete(ModelCorrupt):
    """A file of a model is missing: a download that was interrupted, or a file that was moved away."""
