"""vLLM's own API server, one process, in front of an engine that it has not started. Run by vLLM's interpreter:

    python vllm_api_server.py --model DIRECTORY --port PORT --engine-input ADDRESS --engine-output ADDRESS [FLAG …]

FLAG: any of ``vllm serve``. Rules of this file: standalone. It is run by its path, in an environment that has vLLM
and nothing of ours, and nothing imports it. What it calls is vLLM's to change; it is written for 0.32.

The server binds both addresses, as it does for engines of ``vllm serve``'s own, and an engine connects to them.
"""

from __future__ import annotations

from vllm.entrypoints.launchers.api_server.entry import run_server_worker, setup_server
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
from vllm.utils.argparse_utils import FlexibleArgumentParser


def main() -> None:
    """Serves until it is told to leave."""
    import uvloop

    cli_env_setup()
    parser = make_arg_parser(FlexibleArgumentParser())
    parser.add_argument("--engine-input", required=True)
    parser.add_argument("--engine-output", required=True)
    arguments = parser.parse_args()
    validate_parsed_serve_args(arguments)
    engine = {
        "input_address": arguments.engine_input,
        "output_address": arguments.engine_output,
        "client_count": 1,
        "client_index": 0,
    }
    address, sock = setup_server(arguments, reuse_port=False)
    uvloop.run(run_server_worker(address, sock, arguments, client_config=engine))


if __name__ == "__main__":
    main()
