"""The prompt is long enough for the claim, and short enough for the model."""

from pathlib import Path

from tiercache.demo.question import ANSWER_TOKENS, PROMPT_TOKENS, long_message


def prompt_tokens(model: Path, message: str) -> int:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    chat = [{"role": "user", "content": message}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return len(tokenizer(text, add_special_tokens=False).input_ids)


def test_long_message_fills_47_blocks_and_leaves_some_tokens_to_compute(model: Path) -> None:
    tokens = prompt_tokens(model, long_message(model))
    assert 47 * 128 < tokens <= PROMPT_TOKENS
    assert tokens + ANSWER_TOKENS <= 8192


def test_long_message_is_the_same_every_time_and_ends_with_the_question(model: Path) -> None:
    message = long_message(model, 300)
    assert message == long_message(model, 300)
    assert message.endswith("what is it about?")
    assert len(set(message.split())) > 80, "prose, not one word again and again"
