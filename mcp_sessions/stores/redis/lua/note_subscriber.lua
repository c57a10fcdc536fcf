-- KEYS: subscribers of a resource. ARGV: session, token, milliseconds that it is kept from now on
-- (0: for ever)
local left, wanted = redis.call('PTTL', KEYS[1]), tonumber(ARGV[3])
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
if wanted == 0 then
    redis.call('PERSIST', KEYS[1])
elseif left ~= -1 and left < wanted then
    redis.call('PEXPIRE', KEYS[1], wanted)
end
return false
