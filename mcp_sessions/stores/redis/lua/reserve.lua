-- A place for a new session in the list of all and in that of its principal, which are in one
-- slot, so that both limits hold whoever else makes one.
--
-- KEYS: all sessions (by deadline), those of the principal. ARGV: member, deadline, most sessions,
-- most of one principal, milliseconds that the lists are kept from now on (0: for ever)
if redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[3]) then
    return 'max_sessions'
end
if redis.call('SCARD', KEYS[2]) >= tonumber(ARGV[4]) then
    return 'max_sessions_per_principal'
end
local left = { redis.call('PTTL', KEYS[1]), redis.call('PTTL', KEYS[2]) }
redis.call('ZADD', KEYS[1], ARGV[2], ARGV[1])
redis.call('SADD', KEYS[2], ARGV[1])
local wanted = tonumber(ARGV[5])
for i, key in ipairs(KEYS) do
    if wanted == 0 then
        redis.call('PERSIST', key)
    elseif left[i] ~= -1 and left[i] < wanted then
        -- -1: it holds one that never expires.
        redis.call('PEXPIRE', key, wanted)
    end
end
return ''
