"""Generate text with transformers alone, from a folder that tools/hf_export.py wrote."""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, logging


def main() -> None:
    """Print the prompt and what the model makes of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="the exported folder")
    parser.add_argument("--prompt", default="def ")
    parser.add_argument("--max-new-tokens", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    torch.manual_seed(arguments.seed)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model)
    inputs = tokenizer(arguments.prompt, return_tensors="pt")
    output = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=arguments.max_new_tokens,
        do_sample=True,
        temperature=0.8,
        top_p=0.95,
        pad_token_id=tokenizer.eos_token_id,
    )
    print(tokenizer.decode(output[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()
