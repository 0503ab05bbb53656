"""Hugging Face models: their config.json, weights and tokenizer folders, both ways. No process group, no hub.

families             what each architecture is, and what transformers assumes when config.json is silent
fields               a reader of config.json that remembers what was taken and refuses what it must not ignore
model_flags, rope    config.json -> ModelConfig            model_config_json   ModelConfig -> config.json
weights              which of their tensors is which of ours, row by row
folder               read a model folder                   shards              write safetensors tensor by tensor
folder_tokenizer     its tokenizer as our flags            tokenizer_folder    ours as files that AutoTokenizer loads
imported_settings    ends of text and whatever else has no flag: kept through training, exported again
checkpoint_model     the model that a checkpoint holds     model_card          README.md of an exported folder
verification         logits of both sides                  conversions         export and import, whole
output_folder        a result that is whole or not there
"""
