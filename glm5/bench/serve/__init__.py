"""`glm5 bench serve`: a load generator for any server that speaks OpenAI's API or SGLang's. No torch.

session    the complete benchmark          http, sse    the protocol, with the arrival time of bytes
handshake  find the server, probe it       api_formats  requests and chunks of each kind of server
workload   what is sent (texts, files)     client       one measured request
arrivals   when it is sent                 record       the times of one request
load       one run                         statistics   the results of a run
counters   the server's own metrics        report, plot tables, JSON, PNG
"""
