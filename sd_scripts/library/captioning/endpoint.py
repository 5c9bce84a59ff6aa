"""A server that speaks the protocol of OpenAI's chat completions and looks at images that are sent to it.

What leaves this machine: the image, shrunk and written anew as JPEG, so without anything that the file tells of place, time and camera; the
instruction; the model's name; the key, as a bearer token. No file name, no folder, no caption.
"""

from __future__ import annotations

import base64
import io
import json
import logging
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from email.message import Message
from typing import Any

from PIL import Image

from sd_scripts.schema.captioning import DESCRIBE, KEY_VARIABLE, CaptionSection
from sd_scripts.schema.errors import OptionError, Problem, shortened
from sd_scripts.schema.outside import json_of

TIMEOUT_SECONDS = 300.0
"""A large model on a small machine takes minutes for an image."""
PAUSES_SECONDS = (1.0, 4.0, 15.0, 60.0)
"""Before each further try at a server that is busy or away."""
LONGEST_PAUSE_SECONDS = 120.0
MAX_ANSWER_BYTES = 4 << 20
_BUSY = (408, 409, 425, 429, 500, 502, 503, 504)
log = logging.getLogger("sd_scripts")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Where a server sends us on to is not whom the images and the key are for."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


class Endpoint:
    """One model behind an address."""

    def __init__(self, options: CaptionSection, key: str, pauses: Sequence[float] = PAUSES_SECONDS) -> None:
        self._address = f"{(options.endpoint or '').rstrip('/')}/chat/completions"
        self.about = f"{options.caption_model} at {options.endpoint}"
        self._model = options.caption_model
        self._instruction = options.instruction or DESCRIBE
        self._max_tokens = options.max_new_tokens
        self._key = key
        self._pauses = pauses
        self._opener = urllib.request.build_opener(_NoRedirect)

    def captions(self, images: Sequence[Image.Image]) -> list[str]:
        return [self._caption(image) for image in images]

    def _caption(self, image: Image.Image) -> str:
        body = json.dumps(self._order(image)).encode()
        for pause in (*self._pauses, None):
            try:
                return _words_of(self._answer(body))
            except _Again as err:
                if pause is None:
                    raise OptionError(Problem("endpoint", f"endpoint: {err}, also after {len(self._pauses)} further tries")) from err
                seconds = min(max(pause, err.seconds), LONGEST_PAUSE_SECONDS)
                log.info("%s; trying again in %.0f s", err, seconds)
                time.sleep(seconds)
        raise AssertionError("the last try returns or raises")

    def _order(self, image: Image.Image) -> dict[str, Any]:
        url = f"data:image/jpeg;base64,{base64.b64encode(jpeg(image)).decode()}"
        content = [{"type": "text", "text": self._instruction}, {"type": "image_url", "image_url": {"url": url}}]
        return {"model": self._model, "messages": [{"role": "user", "content": content}], "max_tokens": self._max_tokens}

    def _answer(self, body: bytes) -> Any:
        """Raises _Again where a later try may succeed, OptionError where none will."""
        headers = {"content-type": "application/json", "user-agent": "kohya_like"}
        if self._key:
            headers["authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(self._address, body, headers, method="POST")
        try:
            with self._opener.open(request, timeout=TIMEOUT_SECONDS) as answer:
                return json_of(answer.read(MAX_ANSWER_BYTES))
        except urllib.error.HTTPError as err:
            with err:
                raise self._refusal(err.code, err.headers, err.read(2000)) from None
        except ValueError as err:
            raise OptionError(Problem("endpoint", "endpoint: what it answers is no JSON; is the address right, up to /v1?")) from err
        except OSError as err:
            raise _Again(f"the endpoint cannot be reached ({type(getattr(err, 'reason', err)).__name__})") from err

    def _refusal(self, code: int, headers: Message, said: bytes) -> Exception:
        words = shortened(" ".join(said.decode("utf-8", "replace").split())).replace(self._key or "\0", "(the key)")
        if code in _BUSY:
            after = headers.get("retry-after") or ""
            return _Again(f"the endpoint answers {code}", float(after) if after.isdigit() else 0.0)
        if code in (401, 403):
            return OptionError(Problem("endpoint", f"endpoint: it answers {code}, so the key in {KEY_VARIABLE} is missing or not accepted"))
        if 300 <= code < 400:
            return OptionError(Problem("endpoint", f"endpoint: it sends on to another address ({code}); give that one instead"))
        return OptionError(Problem("endpoint", f"endpoint: it answers {code}: {words}"))


class _Again(Exception):
    """A later try may succeed; seconds: how long the server asks to wait."""

    def __init__(self, text: str, seconds: float = 0.0) -> None:
        super().__init__(text)
        self.seconds = seconds


def jpeg(image: Image.Image) -> bytes:
    """The pixels and nothing else."""
    stream = io.BytesIO()
    image.convert("RGB").save(stream, "JPEG", quality=90)
    return stream.getvalue()


def _words_of(answer: Any) -> str:
    """The text of an answer; some servers give it in pieces."""
    try:
        content = answer["choices"][0]["message"]["content"]
        if isinstance(content, list):
            content = " ".join(str(piece.get("text", "")) for piece in content)
    except (KeyError, IndexError, TypeError, AttributeError) as err:
        raise OptionError(
            Problem("endpoint", "endpoint: its answer is not that of chat completions; does the address end in /v1?")
        ) from err
    return content or ""
