"""Hugging Face models: their config.json, weights and tokenizer folders, both ways. No process group, no hub.

families/            a file for each architecture: its table of config.json's fields and flags, of tensor names
family               what such a table is made of          activation_names    transformers' names of activations
fields, rope         a reader of config.json that remembers what was read and refuses what it must not ignore
model_config         config.json <-> ModelConfig           weights             our tensors <-> theirs, by the table
folder               read a model folder                   shards              write safetensors tensor by tensor
tokenizer_folder     our tokenizers as files that AutoTokenizer loads
imported_settings    ends of text and whatever else has no flag: kept through training, exported again
checkpoint_model     the model that a checkpoint holds     model_card          README.md of an exported folder
verification         logits of both sides                  conversions         export and import, whole
output_folder        a result that is whole or not there
"""
