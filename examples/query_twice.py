"""Ask any OpenAI-compatible server the same long question twice and watch the time to the first token.

    python examples/query_twice.py LONG_TEXT_FILE [--url http://127.0.0.1:8000/v1] [--question "What is this about?"]
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import openai
import typer
from rich.console import Console


def main(
    document: Annotated[Path, typer.Argument(help="A long text file.", exists=True, dir_okay=False)],
    url: Annotated[str, typer.Option(help="Base URL of the server.")] = "http://127.0.0.1:8000/v1",
    question: Annotated[str, typer.Option(help="Asked after the document.")] = "In two sentences: what is this about?",
    tokens: Annotated[int, typer.Option(min=1, help="Length of the answer.")] = 48,
) -> None:
    console = Console(highlight=False)
    client = openai.OpenAI(base_url=url, api_key="not needed", max_retries=0)
    try:
        model = client.models.list().data[0].id
    except openai.APIConnectionError:
        console.print(f"no server answers at {url}; start one, or name it with --url", style="red")
        raise typer.Exit(1) from None
    message = f"{document.read_text(errors='replace')}\n\n{question}"
    results = []
    for name in ("cold", "warm"):
        try:
            results.append(ask(client, model, message, tokens, name, console))
        except openai.BadRequestError as error:
            console.print(f"the server refused: {error.message}", style="red")
            raise typer.Exit(1) from None
    (cold_s, first), (warm_s, second) = results
    console.print(f"{cold_s / warm_s:.1f} times faster; the answers are {'equal' if first == second else 'different'}")


def ask(
    client: openai.OpenAI, model: str, message: str, tokens: int, name: str, console: Console
) -> tuple[float, str]:
    """Return the time to the first token in seconds, and the answer."""
    began = time.perf_counter()
    first = None
    text = ""
    with console.status(f"{name}: waiting for the first token"):
        stream = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": message}],
            max_tokens=tokens,
            temperature=0,
            stream=True,
        )
        for event in stream:
            piece = event.choices[0].delta.content if event.choices else None
            if piece:
                first = first or time.perf_counter()
                text += piece
    if first is None:
        console.print("the server answered without any text", style="red")
        raise typer.Exit(1)
    console.print(f"{name}: first token after {first - began:.3f} s\n  {text.strip()!r}")
    return first - began, text


if __name__ == "__main__":
    typer.run(main)
