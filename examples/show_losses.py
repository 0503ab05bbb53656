"""First and last training loss and the validation losses of a run, from its metrics file."""

import argparse
from pathlib import Path

from megatron_lite.training.metrics_file import read_metrics


def main() -> None:
    """Print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("metrics", help="metrics.jsonl of a run")
    records = read_metrics(Path(parser.parse_args().metrics)).records
    training = [record for record in records if "lm loss" in record]
    validation = [record for record in records if "lm loss validation" in record]
    shown = [("training loss at start", training[0]), ("training loss at end", training[-1])]
    shown += [("validation loss", record) for record in validation]
    for name, record in shown:
        loss = record["lm loss"] if "lm loss" in record else record["lm loss validation"]
        print(
            f"{name:24s}{'not finite' if loss is None else f'{loss:.4f}'} (iteration {record['iteration']})"
        )


if __name__ == "__main__":
    main()
