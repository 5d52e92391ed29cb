"""The OpenAI-compatible front door: asks the router for a pair, drives both legs, relays the stream.

arrive → admit → parse → pair → both legs at once → relay the decode leg → release
"""
