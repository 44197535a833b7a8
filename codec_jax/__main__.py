"""The commands of codec_jax, each with a --help of its own:

    codec-jax generate    complete a file of prompts that share prefixes, with a Hugging Face checkpoint
    codec-jax serve       answer over HTTP as OpenAI's API does, with a Hugging Face checkpoint
    codec-jax profile     measure what this GPU takes for the work that plans divide

`python -m codec_jax` does the same as `codec-jax`.
"""

import importlib
import sys

COMMANDS = ("generate", "serve", "profile")


def main() -> None:
    """Run the command that the first argument names, with the others; list all commands without one."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help"):
        print(__doc__.strip())
    elif name in COMMANDS:
        sys.argv[:2] = [f"codec-jax {name}"]
        importlib.import_module(f"codec_jax.{name}").main()
    else:
        sys.exit(f"codec_jax: expected a command, {', '.join(COMMANDS[:-1])} or {COMMANDS[-1]}, got {name!r}")


if __name__ == "__main__":
    main()
