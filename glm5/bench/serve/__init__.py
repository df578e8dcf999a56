"""`glm5 bench serve`: a load generator for any server that speaks OpenAI's API or SGLang's. No torch.

session    everything, in order            http, sse    the wire, with the time at which bytes were there
meeting    find the server, probe it       dialects     requests and chunks of each kind of server
workload   what is sent (texts, files)     client       one request, measured
arrivals   when it is sent                 record       the times of one request
load       the run itself                  statistics   the figures of a run
counters   what the server counts          report, plot tables, JSON, PNG
"""
