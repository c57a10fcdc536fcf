-- Facts of no single session, which lie in other slots of a cluster.

-- Keeps a list for so many milliseconds from now on (0: for ever). `left`: what it had left before it
-- was written; -1: it holds one that never expires.
local function keep(key, left, wanted)
    wanted = tonumber(wanted)
    if wanted == 0 then
        redis.call('PERSIST', key)
    elseif left ~= -1 and left < wanted then
        redis.call('PEXPIRE', key, wanted)
    end
end

-- script reserve:
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
local all, owned = redis.call('PTTL', KEYS[1]), redis.call('PTTL', KEYS[2])
redis.call('ZADD', KEYS[1], ARGV[2], ARGV[1])
redis.call('SADD', KEYS[2], ARGV[1])
keep(KEYS[1], all, ARGV[5])
keep(KEYS[2], owned, ARGV[5])
return ''

-- script release:
-- KEYS: all sessions, those of a principal. ARGV: member. The deadline that stood in the first list.
local deadline = redis.call('ZSCORE', KEYS[1], ARGV[1])
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('SREM', KEYS[2], ARGV[1])
return deadline

-- script note_subscriber:
-- KEYS: subscribers of a resource. ARGV: session, token, milliseconds that it is kept from now on
-- (0: for ever)
local left = redis.call('PTTL', KEYS[1])
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
keep(KEYS[1], left, ARGV[3])
return false

-- script drop_subscriber:
-- KEYS: subscribers of a resource. ARGV: session, the token that it must have: a newer
-- subscription stays
if redis.call('HGET', KEYS[1], ARGV[1]) == ARGV[2] then
    redis.call('HDEL', KEYS[1], ARGV[1])
end
return false

-- script remember_ends:
-- KEYS: the ends (by time), those that no server wrote to its log yet. ARGV: how many ends are kept,
-- the latest time that is forgotten, milliseconds that the lists are kept, whether the second list
-- gets them too (0 or 1); then time and text of each end. Which of them are new, by their number.
local most, new = tonumber(ARGV[1]), {}
for i = 5, #ARGV, 2 do
    if redis.call('ZADD', KEYS[1], 'NX', ARGV[i], ARGV[i + 1]) == 1 then
        new[#new + 1] = (i - 5) / 2
        if ARGV[4] == '1' then
            redis.call('RPUSH', KEYS[2], ARGV[i + 1])
        end
    end
end
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', ARGV[2])
redis.call('ZREMRANGEBYRANK', KEYS[1], 0, -most - 1)
redis.call('LTRIM', KEYS[2], -most, -1)
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
return new
