"""A program that asks a model: the one under test. It knows nothing of trioleg.

OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=any python ask.py "What is the capital of France?"
"""

import sys

import openai


def ask(question: str, model: str = "smollm2-135m", patience: float = 30.0) -> str:
    """The answer, as far as it came: a broken one ends with a mark."""
    client = openai.OpenAI(timeout=patience, max_retries=2)
    messages = [{"role": "user", "content": question}]
    answer = ""
    try:
        with client.chat.completions.create(model=model, messages=messages, stream=True) as stream:
            for chunk in stream:
                answer += chunk.choices[0].delta.content or ""
    except openai.APIError as error:
        answer += f" [{type(error).__name__}]"
    return answer


if __name__ == "__main__":
    print(ask(sys.argv[1]))
