"""Hugging Face models: their config.json, weights and tokenizer folders, both ways. No process group, no hub.

families        what each architecture is, and what transformers assumes when config.json is silent
fields          a reader of config.json that remembers what was taken and refuses what it must not ignore
model_flags     config.json -> ModelConfig            model_config_json   ModelConfig -> config.json
weights         which of their tensors is which of ours, row by row
folder          read a model folder                   shards              write safetensors, tensor by tensor
tokenizer_folder  our tokenizers as folders that AutoTokenizer loads with equal ids
verification    logits of both sides                  export, importing   the two conversions, whole
"""
