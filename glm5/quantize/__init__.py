"""A checkpoint to a quantized one, layer by layer: the pipeline over `glm5.quant`'s functions.

recipe    names and files -> one recipe, one target     plan       recipe -> what becomes of each module
source    checkpoint -> layers, ahead of their use      layer      one layer's tensors, experts stacked
calibration_text   text -> token ids                    calibrate  inputs of linear layers, as a layer runs
quantize_layer     rotate, smooth, quantize one layer   run        all layers; goes on where it was cut off
verify    what was written, read again                  report     metrics -> HTML and JSON
ladder    methods side by side
"""
