"""First and last training loss and the validation losses of a run, from its metrics file."""

import argparse
import json
from pathlib import Path


def main() -> None:
    """Print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("metrics", help="metrics.jsonl of a run")
    records = [json.loads(line) for line in Path(parser.parse_args().metrics).read_text().splitlines()]
    training = [record for record in records if "lm loss" in record]
    validation = [record for record in records if "lm loss validation" in record]
    for name, record in (("at start", training[0]), ("at the end", training[-1])):
        print(f"training loss {name:11s} {record['lm loss']:.4f} (iteration {record['iteration']})")
    for record in validation:
        print(f"validation loss           {record['lm loss validation']:.4f} (iteration {record['iteration']})")


if __name__ == "__main__":
    main()
